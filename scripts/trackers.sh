#!/usr/bin/env bash
# Logs a run to Weights & Biases (offline), trackio, an MLflow server and TensorBoard, kills it, resumes it, and reads the numbers back with
# their own readers. Nothing leaves the machine. The packages come from PyPI into a temporary folder; TRACKERS names a venv that has them.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
venv=${TRACKERS:-$folder/venv}
if [ ! -e "$venv/bin/python" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check wandb trackio mlflow tensorboard
fi
# As all tests are built, so that nothing is built twice.
cargo build --quiet --workspace --bins --examples
python3 scripts/read_trackers.py "${CARGO_TARGET_DIR:-target}/debug/rollflow" "$venv/bin/python" "$folder"
