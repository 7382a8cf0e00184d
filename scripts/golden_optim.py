"""Writes tests/golden/optim/param_groups.json: three steps of torch.optim.AdamW with parameter groups, as transformers' Trainer makes them.

    python golden_optim.py OUT
"""

import json
import re
import sys
from pathlib import Path

import torch

# Trainer.get_decay_parameter_names of transformers 5.23.0.
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
LANGUAGE_MODEL = {
    "model.embed_tokens.weight": [3, 4],
    "model.layers.0.input_layernorm.weight": [4],
    "model.layers.0.self_attn.q_proj.weight": [4, 4],
    "model.layers.0.self_attn.q_proj.bias": [4],
    "model.layers.0.self_attn.q_norm.weight": [2],
    "model.norm.weight": [4],
    "lm_head.weight": [3, 4],
}
SCORE_MODEL = {**{name: shape for name, shape in LANGUAGE_MODEL.items() if name != "lm_head.weight"}, "score.weight": [1, 4]}
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTERS = {f"{PREFIX}.lora_A.weight": [2, 4], f"{PREFIX}.lora_B.weight": [4, 2]}
CASES = [
    ("matrices", LANGUAGE_MODEL, "matrices", {}, False),
    ("all", LANGUAGE_MODEL, "all", {}, False),
    ("matrices, rates by group", LANGUAGE_MODEL, "matrices", {"embeddings": 0.5, "head": 3.0}, False),
    ("score head, amsgrad", SCORE_MODEL, "matrices", {"embeddings": 0.0, "score_head": 10.0}, True),
    ("adapters", ADAPTERS, "matrices", {"adapters": 4.0}, False),
]
ROLES = [("embeddings", "embed_tokens"), ("head", "lm_head"), ("score_head", "score."), ("adapters", ".lora_")]
LR, BETAS, EPS, WEIGHT_DECAY, SCALE = 0.05, (0.9, 0.95), 1e-8, 0.3, 0.5


def case(name, shapes, decay, lr_scale, amsgrad):
    params = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    before = {name: p.detach().clone() for name, p in params.items()}
    groups = []
    for tensor, parameter in params.items():
        role = next((role for role, part in ROLES if part in tensor), None)
        decays = decay == "all" or not any(re.search(pattern, tensor.lower()) for pattern in NO_DECAY)
        groups.append(dict(params=[parameter], lr=LR * lr_scale.get(role, 1.0), weight_decay=WEIGHT_DECAY if decays else 0.0))
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, amsgrad=amsgrad)
    steps = []
    for _ in range(3):
        grads = {name: torch.randn(shape) for name, shape in shapes.items()}
        for tensor, parameter in params.items():
            parameter.grad = grads[tensor] * SCALE
        optimizer.step()
        flat = lambda of: [number for t in of.values() for number in t.detach().flatten().tolist()]  # noqa: E731
        steps.append(dict(grad=flat(grads), params=flat(params)))
    tensors = [dict(name=name, shape=shape) for name, shape in shapes.items()]
    return dict(name=name, tensors=tensors, decay=decay, lr_scale=lr_scale, amsgrad=amsgrad, params=flat(before), steps=steps)


torch.manual_seed(0)
settings = dict(torch=torch.__version__, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, scale=SCALE)
Path(sys.argv[1]).write_text(json.dumps(dict(**settings, cases=[case(*of) for of in CASES])) + "\n")
