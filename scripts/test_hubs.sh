#!/usr/bin/env bash
# Installs verifiers and openenv-core (700 MB and some minutes, once), and trains with environments of both: examples/hubs.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
venv hubs-0.4.0-0.3.0 pip verifiers==0.4.0 openenv-core==0.3.0
cargo build --release --package rollflow-pipelines --bin rollflow
python3 scripts/test_hubs.py "$venv/bin/python"
