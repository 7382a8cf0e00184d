#!/usr/bin/env bash
# Installs inference servers and runs the tests that drive them, one kind after the other:  scripts/test_engines.sh [vllm] [sglang]
set -euo pipefail
cd "$(dirname "$0")/.."
for kind in "${@:-vllm}"; do
  began=$SECONDS
  ./scripts/engines.sh "$kind"
  installed=$SECONDS
  # One server at a time: each takes 3 GB.
  ROLLFLOW_ENGINE=$kind cargo test --workspace --test real_servers -- --ignored --test-threads 1 --nocapture
  echo "$kind: installed in $((installed - began)) s, tested in $((SECONDS - installed)) s"
done
