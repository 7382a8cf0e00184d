#!/usr/bin/env bash
# Installs inference servers and runs the tests that drive them, one kind after the other:  scripts/test_engines.sh [vllm] [sglang]
#
# Generation is held against the local engine on a server of its own; then runs start, feed, kill and end theirs. One server at a time: each takes 3 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
server=
finish() { [ -z "$server" ] || { kill "$server" 2>/dev/null && wait "$server" || true; }; rm -rf "$work"; }
trap finish EXIT

for kind in "${@:-vllm}"; do
  began=$SECONDS
  ./scripts/engines.sh "$kind"
  installed=$SECONDS
  cargo build --quiet --workspace --bins --examples
  port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  "${CARGO_TARGET_DIR:-target}/debug/rollflow" engine launch "pipelines/recipes/grpo_$kind.toml" --out "$work/$kind" --set "engine.port=$port" > "$work/ready" &
  server=$!
  until grep -q ready: "$work/ready"; do kill -0 "$server" || exit 1; sleep 1; done
  "${CARGO_TARGET_DIR:-target}/debug/rollflow" engine status "http://127.0.0.1:$port" --kind "$kind"
  ROLLFLOW_ENGINE=$kind ROLLFLOW_ENGINE_URL=http://127.0.0.1:$port ROLLFLOW_ENGINE_MODEL=$work/$kind/start \
    cargo test --workspace --test generation -- real_engines:: --ignored --test-threads 1
  kill "$server"
  wait "$server"
  server=
  ROLLFLOW_ENGINE=$kind cargo test --workspace --test command -- real_servers:: --ignored --test-threads 1 --nocapture
  if [ "$kind" = vllm ]; then
    # For the trainer's GPU there is a stand-in.
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="env LD_PRELOAD=$(./scripts/stand_in_gpu.sh library)" ROLLFLOW_ENGINE=vllm \
      cargo test --workspace --test command -- real_servers::vllm_takes_tensors --ignored --nocapture
  fi
  echo "$kind: installed in $((installed - began)) s, tested in $((SECONDS - installed)) s"
done
