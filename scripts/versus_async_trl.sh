#!/usr/bin/env bash
# Runs the same asynchronous GRPO, answered by the same vLLM server, with TRL's AsyncGRPOTrainer and with rollflow, one after the other on this machine.
#
#   scripts/versus_async_trl.sh [ROUNDS]
#
# Needs what scripts/versus_trl.sh needs, and the server of scripts/engines.sh. rollflow's figure has the start of the run in it, TRL's leaves out ten steps.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/trl_env.sh

server=$(./scripts/engines.sh vllm)
home=$(dirname "$server")
site=$("$home/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cargo build --quiet --release --bin rollflow
work=$(mktemp -d)
pid=
# The server leads a process group of its own.
end_server() { [ -z "$pid" ] || { kill -TERM -- "-$pid" 2> /dev/null; wait "$pid" 2> /dev/null; pid=; } || true; }
trap 'end_server; rm -rf "$work"' EXIT
rate() { tail -n 1 "$1" | python3 -c 'import json, sys; print(json.load(sys.stdin)["steps_per_s"])'; }

for round in $(seq "${1:-1}"); do
  python3 benches/trl_async_side.py save "$work/model" > /dev/null 2>&1
  VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 setsid "$server" "$work/model" --served-model-name "$work/model" --host 127.0.0.1 --port 8459 \
    --dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 64 --stream-interval 16 --logprobs-mode processed_logprobs --return-tokens-as-token-ids \
    --enable-scale-out > "$work/server.log" 2>&1 &
  pid=$!
  for _ in $(seq 120); do curl -sf http://127.0.0.1:8459/health > /dev/null && break; sleep 1; done
  LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}:$home/stubs:$site/nvidia/cu13/lib timeout 300 python3 benches/trl_async_side.py run "$work/model" http://127.0.0.1:8459 "$site" \
    > "$work/trl" 2> "$work/trl.log" || { tail -n 20 "$work/trl.log" >&2; exit 1; }
  end_server
  theirs=$(grep steps_per_s "$work/trl" | tail -n 1 > "$work/row"; rate "$work/row")
  echo "round $round  TRL       $theirs steps/s (load $(cut -d' ' -f1 /proc/loadavg))"
  rm -rf "$work/run"
  "${CARGO_TARGET_DIR:-target}/release/rollflow" run benches/versus_async_trl.toml --set "model.path=$work/model" --out "$work/run" > "$work/ours" 2>&1 \
    || { tail -n 20 "$work/ours" >&2; exit 1; }
  ours=$(python3 -c 'import re, sys; print(round(150 / float(re.search(r"finished after ([0-9.]+) s", sys.stdin.read())[1]), 3))' < "$work/ours")
  echo "round $round  rollflow  $ours steps/s (load $(cut -d' ' -f1 /proc/loadavg))"
  python3 -c "print(f'round $round  ratio     {$ours / $theirs:.2f}')"
done
