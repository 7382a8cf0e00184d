"""Makes tests/golden/router_loss.json: loss and gradient norm of golden mixtures of experts with transformers' auxiliary loss.

    python scripts/golden_router_loss.py tests/golden/models tests/golden/router_loss.json

Needs torch and transformers; the committed numbers are those of transformers 5.23.0 on a CPU.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

MODELS = ["qwen3_moe", "qwen3_moe_sparse", "olmoe"]
ROWS = [[5, 8, 33, 12, 40, 7, 7, 19], [1, 2, 3, 60, 11], [44, 9]]
COEFS = [0.0, 0.3, 30.0]


def main(models, out):
    page = {"transformers": transformers.__version__, "rows": ROWS, "models": {}}
    for name in MODELS:
        page["models"][name] = []
        for coef in COEFS:
            model = AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32, attn_implementation="eager")
            # As a trainer reads them: nothing is predicted from a last token.
            longest = max(len(row) for row in ROWS) - 1
            pad = lambda row, filler: row + [filler] * (longest - len(row))
            ids, mask = [torch.tensor([pad(of(row), 0) for row in ROWS]) for of in (lambda row: row[:-1], lambda row: [1] * (len(row) - 1))]
            labels = torch.tensor([pad(row[1:], -100) for row in ROWS])
            found = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
            loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten()) + coef * found.aux_loss
            loss.backward()
            norm = torch.stack([of.grad.double().norm() for of in model.parameters()]).norm().item()
            page["models"][name].append({"coef": coef, "loss": loss.item(), "router_loss": coef * found.aux_loss.item(), "grad_norm": norm})
    out.write_text(json.dumps(page, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
