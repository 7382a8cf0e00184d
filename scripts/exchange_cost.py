#!/usr/bin/env python3
"""Core-seconds that an exchange of ranks costs on CPUs: scripts/exchange_cost.py PROGRAM [ROUNDS]

Trains small decoders on 1, 2 and 4 ranks with ranks.shard = "parameters" and one thread each, and takes the CPU time of
all processes. Runs of two lengths cancel the time of the start. More CPU time than one process needs, divided by the bytes that
all ranks send, is the cost: `BYTE_COST` in pipelines/src/simulate/ranks.rs. CPU time depends little on other load.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile

SHORT, LONG = 2, 12
MODELS = {
    "1.7 million": dict(kind="tiny", hidden=192, layers=4, heads=6, kv_heads=2, intermediate=576, vocab=64),
    "28 million": dict(kind="tiny", hidden=512, layers=8, heads=8, kv_heads=2, intermediate=1536, vocab=8192),
}
# Rows of 128 tokens, two to a micro-batch: a step has 8 micro-batches.
ROWS = dict(batch=16, max_length=128, packing="wrapped", micro_batch_tokens=256, threads=1, gradient_checkpointing=True)
MICRO_BATCHES = 8


def cpu_seconds(program, folder, model, ranks, steps):
    text = 'pipeline = "sft"\nname = "exchange"\nranks.shard = "parameters"\ncheckpoint.every = 0\n'
    for name, keys in {"model": model, "task": {"kind": "arithmetic"}, "sft": {**ROWS, "steps": steps}}.items():
        text += f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    recipe = f"{folder}/recipe.toml"
    with open(recipe, "w") as file:
        file.write(text)
    out = tempfile.mkdtemp(dir=folder)
    start = ["run"] if ranks == 1 else ["launch", "--ranks", str(ranks)]
    with open(f"{folder}/log", "w") as log:
        process = subprocess.Popen([program, *start, recipe, "--out", f"{out}/run"], stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(open(f"{folder}/log").read())
    with open(f"{out}/run/metrics.jsonl") as rows:
        last = json.loads(rows.readlines()[-1])
    return used.ru_utime + used.ru_stime, last


def main():
    program, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            step = {ranks: [] for ranks in (1, 2, 4)}
            for _ in range(rounds):
                for ranks, seen in step.items():
                    short, long = (cpu_seconds(program, folder, model, ranks, steps) for steps in (SHORT, LONG))
                    seen.append((long[0] - short[0]) / (LONG - SHORT))
            width, inner, kv = model["hidden"], model["intermediate"], model["hidden"] // model["heads"] * model["kv_heads"]
            layer = 2 * width * width + 2 * width * kv + 3 * width * inner
            parameters = model["layers"] * layer + model["vocab"] * width
            for ranks in (2, 4):
                # Two gathers and a sum for each micro-batch of a rank, of numbers in f32.
                sent = MICRO_BATCHES / ranks * 3 * (ranks - 1) * 4 * parameters
                costs = [1e9 * (many - one) / sent for one, many in zip(step[1], step[ranks])]
                print(f"{name}, {ranks} ranks: {statistics.median(costs):.2f} ns a byte ({min(costs):.2f} to {max(costs):.2f}), "
                      f"{sent / 1e6:.0f} MB and {statistics.median(step[1]):.2f} core-seconds a step", flush=True)


main()
