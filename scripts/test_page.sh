#!/usr/bin/env bash
# Drives the live page by a real Chromium, which comes from Debian (needs root if it is not installed); a websocket client comes from PyPI.
# Screenshots go to the folder $SHOTS, if that is set.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v chromium google-chrome > /dev/null; then
  echo "installing chromium" >&2
  apt-get install -y --no-install-recommends chromium > /dev/null
fi
. scripts/venv.sh
venv page-1.9.0 pip websocket-client==1.9.0
cargo build --workspace --bin rollflow
"$venv/bin/python" scripts/test_page.py "${CARGO_TARGET_DIR:-target}/debug/rollflow" "$@"
