#!/usr/bin/env bash
# A short run, brought into Weights & Biases and trackio by the lines that docs/how_to/monitoring.md shows, and read back. Nothing leaves the machine; both are
# fetched into a folder of their own.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check wandb trackio
# As all tests are built, so that nothing is built twice.
cargo build --quiet --workspace --bins --examples
"${CARGO_TARGET_DIR:-target}/debug/rollflow" run pipelines/recipes/grpo.toml --out "$folder/run" --set train.steps=5 \
  --set sft.steps=2 --set observe.progress=false --set 'eval={every=2,limit=10}'
"$folder/venv/bin/python" scripts/read_trackers.py "$folder/run"
