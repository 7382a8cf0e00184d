#!/usr/bin/env bash
# A run that is logged to Weights & Biases (offline), trackio and an MLflow server while it lasts, killed and resumed on the way, and read back by
# their own readers. Nothing leaves the machine; the packages are fetched into a folder apart, or are those of TRACKERS, a venv.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
venv=${TRACKERS:-$folder/venv}
if [ ! -e "$venv/bin/python" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check wandb trackio mlflow
fi
# As all tests are built, so that nothing is built twice.
cargo build --quiet --workspace --bins --examples
python3 scripts/read_trackers.py "${CARGO_TARGET_DIR:-target}/debug/rollflow" "$venv/bin/python" "$folder"
