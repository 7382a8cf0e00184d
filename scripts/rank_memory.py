#!/usr/bin/env python3
"""Peak resident memory of ranks: scripts/rank_memory.py PROGRAM

Trains a decoder of 43 million parameters in f32 on 1 to 4 ranks for each `ranks.shard`, with checkpoints that ranks write in
parts while training continues. Prints the largest peak (VmHWM) of the ranks other than 0, and rank 0's. Other load does not
change it.
"""
import os
import shutil
import sys
import tempfile

from rank_runs import recipe, run

MODEL = dict(hidden=640, layers=8, heads=10, kv_heads=2, intermediate=1920, vocab=8192)
ROWS = dict(steps=3, batch=4, max_length=128, packing="wrapped", micro_batch_tokens=128, threads=1)
RUNS = [(1, "nothing")] + [(ranks, shard) for ranks in (2, 3, 4) for shard in ("nothing", "optimizer", "gradients", "parameters")]


def ranks_of(out):
    """Processes of a run by rank: those with its folder among their arguments, and a rank."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{process}/cmdline", "rb").read().split(b"\0")
            variables = dict(word.partition(b"=")[::2] for word in open(f"/proc/{process}/environ", "rb").read().split(b"\0"))
            if out.encode() in words and words[1] == b"run":
                status = open(f"/proc/{process}/status").read()
                yield int(variables.get(b"RANK", b"0")), int(status.split("VmHWM:")[1].split()[0]) * 1024
        except (OSError, IndexError):
            continue


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        path = recipe(folder, MODEL, ROWS)
        print("| ranks, `ranks.shard` | peak of a rank | of rank 0 |\n| --- | ---: | ---: |")
        for ranks, shard in RUNS:
            out, peaks = f"{folder}/{ranks}-{shard}", {}
            sets = [f'ranks.shard="{shard}"', "checkpoint.every=1", "checkpoint.keep=2"]
            run(program, ranks, path, out, *sets, watch=lambda: peaks.update(ranks_of(out)), every=0.02)
            others = [peak for rank, peak in peaks.items() if rank > 0]
            cell = f"{max(others) / 1e6:.0f} MB" if others else ""
            print(f"| {ranks}, `\"{shard}\"` | {cell} | {peaks[0] / 1e6:.0f} MB |", flush=True)
            shutil.rmtree(out)


main()
