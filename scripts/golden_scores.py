"""Makes tests/golden/scores: tiny sequence classifiers with one label, by transformers, and what they compute.

    python3 scripts/golden_scores.py tests/golden/scores      # torch 2.13, transformers 5.23

Each folder is a model as transformers saves it. golden/golden.json holds token sequences, the score that transformers reads off each (at
its last token that is no padding) and those at every token; then pairs of sequences, and three steps of AdamW with clipping on the mean of
-log sigmoid(score of the first - score of the second). golden/expected.safetensors holds the parameters after them.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

SHAPE = dict(
    vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0, eos_token_id=1, num_labels=1,
)
FAMILIES = {
    "llama": dict(attention_bias=True),
    "mistral": dict(sliding_window=5),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(tie_word_embeddings=True),
}
OPTIMIZER = dict(lr=1e-2, betas=[0.9, 0.999], eps=1e-4, weight_decay=0.1, clip_norm=1.0)


def padded(sequences):
    longest = max(map(len, sequences))
    ids = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
    return dict(input_ids=ids, attention_mask=mask)


def main(root):
    for at, (family, more) in enumerate(FAMILIES.items()):
        torch.manual_seed(at)
        config = AutoConfig.for_model(family, **SHAPE, **more)
        model = AutoModelForSequenceClassification.from_config(config).float().eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
        folder = root / family
        model.save_pretrained(folder)
        sequences = [torch.randint(2, 40, (n,)).tolist() for n in (3, 9, 1, 6)] + [[7, 8, 9, 0], [7, 8, 9, 1]]
        pairs = [[torch.randint(2, 40, (n,)).tolist() for n in lens] for lens in ((4, 7), (8, 3), (2, 2))]
        with torch.no_grad():
            pooled = model(**padded(sequences)).logits[:, 0].tolist()
            every = [model.score(model.model(torch.tensor([s])).last_hidden_state)[0, :, 0].tolist() for s in sequences]
        optimizer = torch.optim.AdamW(model.parameters(), **{k: v for k, v in OPTIMIZER.items() if k != "clip_norm"})
        steps = []
        for _ in range(3):
            scores = model(**padded([sequence for pair in pairs for sequence in pair])).logits[:, 0].view(-1, 2)
            loss = -torch.nn.functional.logsigmoid(scores[:, 0] - scores[:, 1]).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_norm"])
            steps.append(dict(loss=loss.item(), grad_norm=norm.item(), scores=scores.flatten().tolist()))
            optimizer.step()
        (folder / "golden").mkdir(exist_ok=True)
        golden = dict(sequences=sequences, pooled=pooled, every=every, pairs=pairs, optimizer=OPTIMIZER, steps=steps)
        (folder / "golden/golden.json").write_text(json.dumps(golden, indent=1) + "\n")
        save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, folder / "golden/expected.safetensors")


main(Path(sys.argv[1]))
