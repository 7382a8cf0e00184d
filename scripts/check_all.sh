#!/usr/bin/env bash
# All of CI, longer, and with other people's programs: 20,000 schedules, 5,000 fault seeds, 10,000 fleets in simulated time, a crate outside the workspace, a stand-in for a GPU,
# transformers and PEFT, Chromium, Prometheus, TensorBoard, Weights & Biases, trackio and a real vLLM server (SGLANG=1: SGLang too).
set -euo pipefail
cd "$(dirname "$0")/.."
step() { printf '\n\033[1m== %s\033[0m (%ss)\n' "$1" "$SECONDS"; }
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0

# 3 GB to fetch and unpack, while the processors do other work.
./scripts/engines.sh vllm > /dev/null &
vllm=$!
trap 'kill "$vllm" 2> /dev/null || true' EXIT

MODEL_CHECK_SCHEDULES=20000 FAULT_SEEDS=5000 FLEET_SEEDS=10000 ENGINE_SEEDS=1000 TINKER_SEEDS=100 ./.ci/run

step "every recipe on \"cuda\", a stand-in for a GPU"
./scripts/stand_in_gpu.sh

step "a crate outside the workspace"
./scripts/outside_crate.sh

step "exports, read by transformers and PEFT"
./scripts/check_export.sh

step "a run, watched by Prometheus"
./scripts/test_monitoring.sh

step "the live page in a browser"
./scripts/test_page.sh

step "metrics in Weights & Biases, trackio, MLflow and TensorBoard, read back"
./scripts/trackers.sh

step "environments of verifiers and OpenEnv"
./scripts/test_hubs.sh

step "real servers"
wait "$vllm"
make test-engines ENGINES="vllm${SGLANG:+ sglang}"

step "done"
