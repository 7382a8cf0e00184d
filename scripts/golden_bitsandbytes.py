"""Makes tests/golden/bitsandbytes: tensors in 4 bits, and a small model whose layers are, with adapters, their loss and their gradient.

    python scripts/golden_bitsandbytes.py tests/golden/bitsandbytes

Needs torch, transformers, peft and bitsandbytes; the committed numbers are those of bitsandbytes 0.50.2, transformers 5.23.0 and peft 0.19 on a CPU.
"""

import json
import shutil
import sys
from pathlib import Path

import bitsandbytes
import bitsandbytes.functional as F
import peft
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

ROWS = [[5, 8, 33, 12, 40, 7, 7, 19], [1, 2, 3, 60, 11], [44, 9]]


def tensors(folder):
    made = {}
    for name, shape, dtype in [("f32", (96, 160), torch.float32), ("bf16", (64, 64), torch.bfloat16), ("many", (68, 256), torch.float32), ("few", (8, 8), torch.float32)]:
        torch.manual_seed(3)
        numbers = (torch.randn(shape) * 0.02).to(dtype)
        numbers[0, :64] = 0
        codes, state = F.quantize_4bit(numbers, quant_type="nf4", compress_statistics=True)
        made.update({
            f"{name}.numbers": numbers.float(), f"{name}.codes": codes.flatten(), f"{name}.scales": state.absmax, f"{name}.outer": state.state2.absmax,
            f"{name}.offset": state.offset.reshape(1), f"{name}.fine_levels": state.state2.code, f"{name}.levels": state.code,
            f"{name}.dequantised": F.dequantize_4bit(codes, state).float().flatten(),
        })
    save_file(made, folder / "tensors.safetensors")


def model(folder, double):
    whole = folder.with_suffix(".whole")
    torch.manual_seed(1)
    config = AutoConfig.for_model("qwen2", vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                  max_position_embeddings=128, initializer_range=0.15, eos_token_id=1, pad_token_id=0, bos_token_id=None, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(whole)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(whole, quantization_config=options, dtype=torch.float32, attn_implementation="eager", device_map={"": "cpu"})
    shutil.rmtree(whole)
    model.save_pretrained(folder)
    expected = {}
    with torch.no_grad():
        for at, row in enumerate(ROWS):
            expected[f"logits.{at}"] = model(torch.tensor([row])).logits[0].float()
    torch.manual_seed(2)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, 0.0, 0.1)
    adapted.save_pretrained(folder / "adapters")
    (folder / "adapters/README.md").unlink()
    settings = json.loads((folder / "adapters/adapter_config.json").read_text())
    (folder / "adapters/adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": str(folder)}, indent=1) + "\n")
    tokens = sum(len(row) - 1 for row in ROWS)
    loss = sum(torch.nn.functional.cross_entropy(adapted(torch.tensor([row])).logits[0, :-1], torch.tensor(row[1:]), reduction="sum") for row in ROWS) / tokens
    loss.backward()
    expected.update({f"gradient.{name.replace('.default', '')}": p.grad for name, p in adapted.named_parameters() if p.requires_grad})
    save_file({key: value.contiguous() for key, value in expected.items()}, folder / "expected.safetensors")
    versions = dict(bitsandbytes=bitsandbytes.__version__, transformers=transformers.__version__, peft=peft.__version__, torch=torch.__version__)
    (folder / "golden.json").write_text(json.dumps(dict(rows=ROWS, loss=float(loss), versions=versions), indent=1) + "\n")


folder = Path(sys.argv[1])
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir(parents=True)
tensors(folder)
model(folder / "qwen2", True)
model(folder / "qwen2_plain_scales", False)
