"""Makes tests/golden/trl_distillation.json and tests/golden/cookbook_distillation.json: divergences from a teacher.

    python3 scripts/golden_distillation.py tests/golden      # torch, trl 1.16, tinker-cookbook 0.6.1

TRL: `GKDTrainer.generalized_jsd_loss`, and the divergence over a teacher's likeliest tokens and one for the rest
(`_add_tail_bucket`, `_jsd_divergence`), with gradients by the student's logits. Cookbook: `incorporate_kl_penalty`.
"""

import asyncio
import json
import sys
from importlib.metadata import version
from pathlib import Path

import tinker
import torch
from tinker_cookbook.distillation.train_on_policy import incorporate_kl_penalty
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

SHAPE = (2, 4, 7)


def tensor(values):
    return {"dtype": str(values.dtype).removeprefix("torch."), "shape": list(values.shape), "data": values.flatten().tolist()}


def logits():
    student = (torch.randn(SHAPE, dtype=torch.float64) * 2).requires_grad_(True)
    teacher = torch.randn(SHAPE, dtype=torch.float64) * 2
    labels = torch.full(SHAPE[:2], 1)
    labels[0, :2] = -100
    labels[1, 3] = -100
    return student, teacher, labels


def case(kind, config, student, teacher, labels, loss):
    (gradient,) = torch.autograd.grad(loss, student)
    inputs = {"student_logits": tensor(student.detach()), "teacher_logits": tensor(teacher), "labels": tensor(labels)}
    expected = {"loss": tensor(loss.detach().reshape(1)), "grad": tensor(gradient)}
    return {"name": f"{kind}/" + ",".join(f"{key}={value}" for key, value in config.items()), "config": config, "inputs": inputs, "expected": expected}


def full(beta, temperature, reduction, items):
    student, teacher, labels = logits()
    loss = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta, temperature, reduction, items)
    config = {"beta": beta, "temperature": temperature, "reduction": reduction, "num_items_in_batch": items}
    return case("generalized_jsd", config, student, teacher, labels, loss)


def top(beta, k):
    student, teacher, labels = logits()
    theirs, ids = teacher.log_softmax(-1).topk(k, -1)
    own = student.log_softmax(-1).gather(-1, ids)
    there = torch.ones_like(own, dtype=torch.bool)
    own, mask = _add_tail_bucket(own, there)
    theirs, _ = _add_tail_bucket(theirs, there)
    trained = labels != -100
    loss = _jsd_divergence(own, theirs, beta, mask)[trained].sum() / trained.sum()
    return case("top_k", {"beta": beta, "top_k": k}, student, teacher, labels, loss)


class Teacher:
    """A sampling client with known log-probabilities."""

    def __init__(self, log_probs):
        self.log_probs = log_probs

    def compute_logprobs(self, _):
        async def found():
            return [None, *self.log_probs]

        return type("Future", (), {"coroutine": staticmethod(found)})


def penalty(coef, discount):
    given, sampled = 2, 5
    data, teachers, raw = [], [], []
    for row in range(2):
        own, theirs = (-torch.rand(given + sampled - 1) * 3, -torch.rand(given + sampled - 1) * 3)
        mask = torch.tensor([0.0] * (given - 1) + [1.0] * sampled)
        rewards = torch.full_like(own, 0.25 * row) * mask
        columns = {"logprobs": own, "mask": mask, "advantages": rewards, "target_tokens": torch.arange(given + sampled - 1)}
        data.append(tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(range(given + sampled - 1))),
            loss_fn_inputs={name: tinker.TensorData.from_torch(values) for name, values in columns.items()},
        ))
        teachers.append(Teacher(theirs.tolist()))
        raw.append((own, theirs, mask))
    metrics = asyncio.run(incorporate_kl_penalty(data, teachers, [0, 0], coef, discount))
    trained = lambda values, mask: values[mask > 0].tolist()
    rows = [
        {"log_probs": trained(own, mask), "teacher": trained(theirs, mask), "reward": 0.25 * row,
         "advantages": trained(datum.loss_fn_inputs["advantages"].to_torch(), mask)}
        for row, (datum, (own, theirs, mask)) in enumerate(zip(data, raw))
    ]
    return {"coef": coef, "discount": discount, "rows": rows, "teacher_kl": metrics["teacher_kl"]}


def main(folder):
    torch.manual_seed(0)
    cases = [full(beta, temperature, "batchmean", None) for beta in (0, 0.1, 0.5, 0.9, 1) for temperature in (1.0, 0.7)]
    cases += [full(0.5, 1.0, reduction, None) for reduction in ("sum", "mean")] + [full(0.5, 1.0, "batchmean", 11)]
    cases += [top(beta, k) for beta in (0, 0.3, 1) for k in (1, 3)]
    tolerance = {"float64": {"rtol": 1e-9, "atol": 1e-12}}
    file = {"name": "TRL's divergences from a teacher", "versions": {"torch": torch.__version__, "trl": version("trl")},
            "tolerance": tolerance, "cases": cases}
    (folder / "trl_distillation.json").write_text(json.dumps(file) + "\n")
    file = {"name": "tinker-cookbook's incorporate_kl_penalty", "versions": {"tinker-cookbook": version("tinker-cookbook")},
            "penalties": [penalty(*of) for of in ((1.0, 0.0), (0.5, 0.0), (2.0, 0.9), (1.0, 1.0))]}
    (folder / "cookbook_distillation.json").write_text(json.dumps(file) + "\n")


main(Path(sys.argv[1]))
