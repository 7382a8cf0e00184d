"""Models that TRL and rollflow both start from: random Qwen2, with a tokenizer of characters."""
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SIZES = dict(tiny=dict(vocab=64, hidden=128, layers=4, heads=4, inter=384, answer=16, rows=64, length=64),
             mid=dict(vocab=8192, hidden=512, layers=8, heads=8, inter=1536, answer=64, rows=16, length=128))


def tokenizer(size=64):
    names = ["<pad>", "<eos>", "<bos>", "<unk>"] + list("0123456789+-*/=() .,:;?!<>abcdefghijklmnopqrstuvwxyzABCD\n")
    vocab = {name: i for i, name in enumerate(names)}
    while len(vocab) < size:
        vocab[f"<extra_{len(vocab) - len(names)}>"] = len(vocab)
    bare = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    bare.decoder = decoders.Fuse()
    bare.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>"])
    return PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>",
                                   unk_token="<unk>", padding_side="left", clean_up_tokenization_spaces=False)


def model(size, tied=True):
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=size["vocab"], hidden_size=size["hidden"], intermediate_size=size["inter"],
                         num_hidden_layers=size["layers"], num_attention_heads=size["heads"], num_key_value_heads=2,
                         max_position_embeddings=2048, tie_word_embeddings=tied, bos_token_id=2, eos_token_id=1, pad_token_id=0, dtype="float32", use_cache=True)
    policy = Qwen2ForCausalLM(config).float()
    policy.generation_config.eos_token_id, policy.generation_config.pad_token_id = 1, 0
    return policy
