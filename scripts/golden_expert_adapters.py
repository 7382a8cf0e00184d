"""Makes tests/golden/expert_adapters, router_adapters and shared_adapters: PEFT's adapters of a golden mixture's attention and experts, and of what its
all-linear means, routers and the gate of an expert of every token among them, with their loss and gradient.

    python scripts/golden_expert_adapters.py tests/golden/models/qwen3_moe tests/golden/expert_adapters
    python scripts/golden_expert_adapters.py tests/golden/models/olmoe tests/golden/router_adapters all-linear
    python scripts/golden_expert_adapters.py tests/golden/models/qwen3_5_moe tests/golden/shared_adapters all-linear

Needs torch, transformers and peft; the committed numbers are those of transformers 5.23.0 and peft 0.21.2 on a CPU.
"""

import json
import sys
from pathlib import Path

import peft
import torch
import transformers
from transformers import AutoModelForCausalLM

ROWS = [[5, 8, 33, 12, 40, 7, 7, 19], [1, 2, 3, 60, 11], [44, 9]]
KEPT = ["peft_type", "task_type", "r", "lora_alpha", "target_modules", "target_parameters", "rank_pattern", "alpha_pattern", "bias"]

model, folder = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(3)
base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
projections = sys.argv[3] if len(sys.argv) > 3 else ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=6, target_modules=projections, task_type="CAUSAL_LM"))
for name, p in adapted.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(p, 0.0, 0.2)
adapted.save_pretrained(folder)
(folder / "README.md").unlink()
path = folder / "adapter_config.json"
settings = json.loads(path.read_text())
path.write_text(json.dumps({key: sorted(of) if isinstance(of := settings[key], list) else of for key in KEPT}, indent=1) + "\n")

# As a trainer reads the rows: the mean over all tokens but the first of each.
total = 0
for row in ROWS:
    logits = adapted(torch.tensor([row])).logits[0].float()
    total = total + torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(row[1:]), reduction="sum")
loss = total / sum(len(row) - 1 for row in ROWS)
loss.backward()
norm = lambda part: sum(float(p.grad.double().norm() ** 2) for name, p in adapted.named_parameters() if part in name and p.grad is not None) ** 0.5
found = {"versions": {"transformers": transformers.__version__, "peft": peft.__version__}, "rows": ROWS, "loss": loss.item(),
         "gradient_norm": norm("lora"), "gradient_norm_of_experts": norm("experts"),
         "gradient_norm_of_routers": norm("mlp.gate.")}
(folder / "golden.json").write_text(json.dumps(found) + "\n")
