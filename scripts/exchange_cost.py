#!/usr/bin/env python3
"""Core-seconds that an exchange of ranks costs on CPUs: scripts/exchange_cost.py PROGRAM [ROUNDS]

Trains small decoders on 1, 2 and 4 ranks with ranks.shard = "parameters" and one thread each, and takes the CPU time of
all processes. Runs of two lengths cancel the time of the start. More CPU time than one process needs, divided by the bytes that
all ranks send, is the cost: `BYTE_COST` in pipelines/src/simulate/ranks.rs. CPU time depends little on other load.
"""
import resource
import statistics
import sys
import tempfile

from rank_runs import recipe, run

SHORT, LONG = 2, 12
MODELS = {
    "1.7 million": dict(hidden=192, layers=4, heads=6, kv_heads=2, intermediate=576, vocab=64),
    "28 million": dict(hidden=512, layers=8, heads=8, kv_heads=2, intermediate=1536, vocab=8192),
}
# Rows of 128 tokens, two to a micro-batch: a step has 8 micro-batches.
ROWS = dict(batch=16, max_length=128, packing="wrapped", micro_batch_tokens=256, threads=1, gradient_checkpointing=True)
MICRO_BATCHES = 8


def cpu_seconds(program, path, ranks, steps):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        run(program, ranks, path, f"{folder}/run", 'ranks.shard="parameters"', "checkpoint.every=0", f"sft.steps={steps}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    program, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            path, step = recipe(folder, model, ROWS), {ranks: [] for ranks in (1, 2, 4)}
            for _ in range(rounds):
                for ranks, seen in step.items():
                    short, long = (cpu_seconds(program, path, ranks, steps) for steps in (SHORT, LONG))
                    seen.append((long - short) / (LONG - SHORT))
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
