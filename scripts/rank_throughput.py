#!/usr/bin/env python3
"""Throughput of 2 ranks with a thread each, against one process with 2 threads: scripts/rank_throughput.py [ROUNDS]

Trains a decoder of 28 million parameters (16 rows of 128 tokens a step) with `rollflow run` and `rollflow launch --ranks 2` in
turn, and prints the median time of a step of each and the ratio to one process with 2 threads. A machine with 2 idle cores measures it: the load is
printed before each run. ROLLFLOW names the program; default: target/release/rollflow."""
import json
import os
import statistics
import sys
import tempfile
import time

from rank_runs import recipe, run

PROGRAM = os.environ.get("ROLLFLOW", "target/release/rollflow")
STEPS, WARM_UP = 10, 2
MODEL = dict(hidden=512, layers=8, heads=8, kv_heads=2, intermediate=1536, vocab=8192)
ROWS = dict(steps=STEPS, batch=16, max_length=128, packing="wrapped", micro_batch_tokens=1024)
# How each run is divided, and the run of one process that does the same work. Divided parameters imply gradient checkpointing.
ALONE, AGAIN = "one process", "one process, checkpointing"
RUNS = {ALONE: None, "nothing": ALONE, "optimizer": ALONE, "gradients": ALONE, AGAIN: None, "parameters": AGAIN}


def step_seconds(path, out, name):
    """Median time of a step, by the rows of metrics.jsonl."""
    ends = []
    watch = lambda: ends.extend([time.monotonic()] * (rows(out) - len(ends)))
    if RUNS[name] is None:
        run(PROGRAM, 1, path, out, "sft.threads=2", f"sft.gradient_checkpointing={json.dumps(name == AGAIN)}", watch=watch)
    else:
        run(PROGRAM, 2, path, out, "sft.threads=1", f'ranks.shard="{name}"', watch=watch)
    if len(ends) < STEPS:
        sys.exit(f"{name}: {len(ends)} of {STEPS} steps were seen")
    return statistics.median(after - before for before, after in zip(ends[WARM_UP:], ends[WARM_UP + 1 :]))


def rows(out):
    try:
        with open(f"{out}/metrics.jsonl", "rb") as file:
            return file.read().count(b"\n")
    except FileNotFoundError:
        return 0


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    seen = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        path = recipe(folder, MODEL, ROWS)
        for at in range(rounds):
            for name in RUNS:
                load = os.getloadavg()[0]
                seconds = step_seconds(path, f"{folder}/{at}-{len(seen[name])}-{name.replace(' ', '-')}", name)
                seen[name].append(seconds)
                print(f"round {at + 1}  {name:26} {seconds:.3f} s a step (load {load:.1f})", flush=True)
    for name, alone in RUNS.items():
        if alone:
            ratios = [one / ranks for one, ranks in zip(seen[alone], seen[name])]
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"2 ranks, {name:12} {statistics.median(ratios):.2f} of {alone} ({each})")


main()
