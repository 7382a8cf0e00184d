#!/usr/bin/env python3
"""Compares forecasts with runs of 1 to 4 ranks and of 1 to 4 engines on this machine.

    scripts/scaling.py target/release/rollflow [ROUNDS]

Each round records a profile on one process, runs everything once, and forecasts each run from that profile.
Rounds are interleaved, because machines are shared; the table has medians over the rounds. Synchronous runs, so
that trainer and engines do not take cores from each other. One thread per process.
"""
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

STEPS, WARM_UP = 6, 1
CORES = len(os.sched_getaffinity(0))
RECIPE = """
pipeline = "grpo"
[model]
kind = "folder"
path = "{model}"
[task]
kind = "arithmetic"
[generate]
group_size = 8
max_new_tokens = 48
ignore_eos = true
max_num_seqs = 64
[reward]
kind = "regex"
pattern = '[0-4][0-9]'
require_end_of_text = false
[batch]
groups = 8
[train]
steps = {steps}
lr = 1e-6
micro_batch_tokens = 256
[flow]
max_staleness = 0
"""
TINY = {"hidden": 192, "layers": 4, "heads": 6, "kv_heads": 2, "intermediate": 576, "vocab": 64}
RANKS = [(1, "nothing"), (2, "nothing"), (3, "nothing"), (4, "nothing"), (2, "optimizer"), (2, "parameters"), (4, "parameters")]
ENGINES = [1, 2, 4]


def command(program, *args):
    done = subprocess.run([program, *map(str, args)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, args))}: {done.stderr[-2000:]}")
    return done.stdout


def steps_per_hour(program, run, *args):
    """Runs, and takes the time from the end of the warm-up to the last step by the rows of metrics.jsonl."""
    log, ends = run / "metrics.jsonl", []
    with subprocess.Popen([program, *map(str, args), "--out", run], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            rows = log.read_bytes().count(b"\n") if log.exists() else 0
            ends += [time.monotonic()] * (rows - len(ends))
            time.sleep(0.003)
        if process.returncode or len(ends) < STEPS:
            sys.exit(f"{args}: {len(ends)} steps; {process.stderr.read()[-2000:]}")
    return 3600 * (STEPS - WARM_UP) / (ends[STEPS - 1] - ends[WARM_UP - 1])


def forecast(program, recipe, profile, *args):
    out = command(program, "simulate", recipe, "--profile", profile, "--steps", 200, *args)
    return float(re.search(r"(\d+) steps/h", out)[1])


def main():
    program, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    top = pathlib.Path(tempfile.mkdtemp(prefix="scaling_"))
    # A model whose weights are random: a run of one step with a learning rate that changes nothing.
    first = top / "first"
    (top / "first.toml").write_text('pipeline = "sft"\n[task]\nkind = "arithmetic"\n[sft]\nsteps = 1\nlr = 1e-9\n[model]\nkind = "tiny"\n'
                                    + "".join(f"{key} = {value}\n" for key, value in TINY.items()))
    command(program, "run", top / "first.toml", "--out", first)
    model = next((first / "checkpoints").glob("step_*"))
    config, weights = json.loads((model / "config.json").read_text()), (model / "model.safetensors").stat().st_size
    parameters = weights / 4
    recipe = top / "recipe.toml"
    recipe.write_text(RECIPE.format(model=model, steps=STEPS))
    print(f"{parameters / 1e6:.1f} million parameters, {CORES} cores, {config['num_hidden_layers']} layers", flush=True)
    found = {}
    for turn in range(rounds):
        profile = top / f"profile_{turn}.json"
        command(program, "simulate", recipe, "--profile", profile, "--record", STEPS, "--steps", 1)
        cluster = ["--set", f"cluster.parameters={parameters}", "--set", f"cluster.layers={TINY['layers']}", "--set", "cluster.ranks_per_host=8", "--set", "cluster.cpus=true"]
        for ranks, shard in RANKS:
            run, sets = top / f"ranks_{ranks}_{shard}_{turn}", ["--set", f'ranks.shard="{shard}"']
            start = ["run"] if ranks == 1 else ["launch", "--ranks", ranks]
            devices = ["--set", f"cluster.ranks={ranks}", "--set", f"cluster.rank_devices={min(ranks, CORES)}"]
            measured = steps_per_hour(program, run, *start, recipe, *sets)
            pair = measured, forecast(program, recipe, profile, *cluster, *devices, *sets)
            found.setdefault(f"{ranks} ranks, {shard}", []).append(pair)
        for engines in ENGINES:
            servers = [subprocess.Popen([program, "serve", model, "--listen", "127.0.0.1:0", "--slots", "64"],
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(engines)]
            try:
                urls = [next(line for line in server.stdout if line.startswith("ready: "))[7:].strip() for server in servers]
                run, sets = top / f"engines_{engines}_{turn}", ["--set", f'engine={{kind="rollflow",carry="stream",urls={json.dumps(urls)}}}']
                measured = steps_per_hour(program, run, "run", recipe, *sets)
            finally:
                for server in servers:
                    server.terminate()
                    server.wait()
            devices = ["--set", f"cluster.engines={engines}", "--set", f"cluster.engine_devices={min(engines, CORES)}"]
            pair = measured, forecast(program, recipe, profile, *devices, *sets)
            found.setdefault(f"{engines} engines", []).append(pair)
        load = os.getloadavg()[0]
        print(f"round {turn}, load {load:.1f}: " + ", ".join(f"{name} {pairs[-1][0]:.0f}/{pairs[-1][1]:.0f}" for name, pairs in found.items()), flush=True)
    print("| run | measured, steps/h | forecast | off by | range |\n| --- | ---: | ---: | ---: | --- |")
    for name, pairs in found.items():
        measured, expected = (statistics.median(column) for column in zip(*pairs))
        off = sorted(100 * (forecast / real - 1) for real, forecast in pairs)
        print(f"| {name} | {measured:.0f} | {expected:.0f} | {statistics.median(off):+.0f} % | {off[0]:+.0f} to {off[-1]:+.0f} % |")


main()
