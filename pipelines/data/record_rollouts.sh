#!/bin/sh
# Writes rollouts_addition.jsonl: what a tiny decoder answers to the 100 single-digit sums after a warm-up that leaves it right one time in four,
# 16 times each, with what each answer earned. From the repository's root: sh pipelines/data/record_rollouts.sh
set -eu
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
# One step over all sums; its rate is too small to matter.
cargo run --release --quiet --bin rollflow -- run pipelines/recipes/grpo.toml --out "$run/run" --set sft.steps=45 --set batch.groups=100 \
    --set generate.group_size=16 --set train.steps=1 --set train.lr=1e-9 --set 'filter=[]' --set observe.rollouts_every=1
python3 - "$run/run/rollouts.jsonl" pipelines/data/rollouts_addition.jsonl <<'PYTHON'
import json
import sys

# What a plain record needs: the rest follows from it.
with open(sys.argv[1]) as rollouts, open(sys.argv[2], "w") as plain:
    for line in rollouts:
        rollout = json.loads(line)
        kept = {key: rollout[key] for key in ("prompt", "response", "reward")}
        if rollout["status"] != "completed":
            kept["status"] = rollout["status"]
        plain.write(json.dumps(kept) + "\n")
PYTHON
