"""Makes tests/golden/routers.json: loss and gradient norm of golden mixtures of experts with transformers' auxiliary loss, and with
given experts for each token ("replayed": router logits as they are, other experts).

    python scripts/golden_routers.py tests/golden/models tests/golden/routers.json

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


def computed(model, coef):
    """Loss, auxiliary loss and gradient norm. As a trainer reads the rows: nothing is predicted from a last token."""
    longest = max(len(row) for row in ROWS) - 1
    pad = lambda row, filler: row + [filler] * (longest - len(row))
    ids, mask = [torch.tensor([pad(of(row), 0) for row in ROWS]) for of in (lambda row: row[:-1], lambda row: [1] * (len(row) - 1))]
    labels = torch.tensor([pad(row[1:], -100) for row in ROWS])
    found = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten()) + coef * found.aux_loss
    loss.backward()
    norm = torch.stack([of.grad.double().norm() for of in model.parameters()]).norm().item()
    return loss.item(), coef * found.aux_loss.item(), norm


def replay(model):
    """Lets given experts compute the tokens. Returns them: of each row's tokens but the last, layer by layer."""
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    of, longest = model.config, max(len(row) for row in ROWS) - 1
    count, each = of.num_experts, of.num_experts_per_tok
    torch.manual_seed(7)
    experts = torch.stack([torch.randperm(count)[:each] for _ in range(len(ROWS) * longest * len(gates))]).view(len(ROWS), longest, len(gates), each)
    for layer, gate in enumerate(gates):
        chosen, own = experts[:, :, layer].reshape(-1, each), gate.forward

        def forward(hidden, own=own, chosen=chosen):
            logits = own(hidden)[0]
            weights = torch.nn.functional.softmax(logits, dtype=torch.float, dim=-1).gather(-1, chosen)
            if of.norm_topk_prob:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            return logits, weights.to(logits.dtype), chosen

        gate.forward = forward
    return {"layers": len(gates), "per_token": each, "experts": [experts[at, : len(row) - 1].flatten().tolist() for at, row in enumerate(ROWS)]}


def main(models, out):
    page = {"transformers": transformers.__version__, "rows": ROWS, "models": {}, "replayed": {}}
    for name in MODELS:
        load = lambda: AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32, attn_implementation="eager")
        page["models"][name] = []
        for coef in COEFS:
            loss, router_loss, norm = computed(load(), coef)
            page["models"][name].append({"coef": coef, "loss": loss, "router_loss": router_loss, "grad_norm": norm})
        model = load()
        given = replay(model)
        loss, _, norm = computed(model, 0.0)
        page["replayed"][name] = {**given, "loss": loss, "grad_norm": norm}
    out.write_text(json.dumps(page, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
