#!/usr/bin/env bash
# Installs verifiers and openenv-core (700 MB and some minutes, once), and trains with environments of both: examples/hubs.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${ROLLFLOW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rollflow}
venv=$cache/hubs-0.4.0-0.3.0
if [ ! -e "$venv/complete" ]; then
  echo "installing verifiers and openenv-core into $venv" >&2
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q --disable-pip-version-check verifiers==0.4.0 openenv-core==0.3.0
  touch "$venv/complete"
fi
cargo build --release --package rollflow-pipelines --bin rollflow
python3 scripts/test_hubs.py "$venv/bin/python"
