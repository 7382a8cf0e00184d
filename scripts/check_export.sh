#!/usr/bin/env bash
# Trains a little, exports, and loads everything that was written with transformers and PEFT: their logits and token ids must be ours.
#
#   scripts/check_export.sh
#
# They go into a virtual environment in ${ROLLFLOW_CACHE:-~/.cache/rollflow}, once: 100 MB, for they use the torch that libtorch.sh has fetched, with
# stand-ins for the NVIDIA libraries that it is linked with. EXPORT_ENV names a script to source instead, for a machine that has all of it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh

# Only python gets to see the stand-ins.
paths=()
if [ -n "${EXPORT_ENV:-}" ]; then
  before=${LD_LIBRARY_PATH:-}
  . "$EXPORT_ENV"
  paths=("LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}")
  export LD_LIBRARY_PATH=$before
else
  wheel=$(cd "$(readlink -f .libtorch)/.." && pwd)/wheel
  transformers() {
    pip transformers==5.23.0 numpy==2.4.6 psutil==7.2.2 sympy==1.14.0 networkx==3.6.1 jinja2==3.1.6
    # Both ask for another torch.
    pip --no-deps peft==0.21.2 accelerate==1.15.0
    if [ -d "$wheel/torch" ]; then python3 scripts/torch_stubs.py "$wheel" "$venv/stubs"; else pip torch==2.11.0; fi
  }
  venv transformers-5.23.0 transformers
  PATH=$venv/bin:$PATH
  if [ -d "$venv/stubs" ]; then
    paths=("PYTHONPATH=$wheel" "LD_LIBRARY_PATH=$venv/stubs:$wheel/nvidia/cu13/lib")
  fi
fi
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# As all tests are built, so that nothing is built twice.
cargo build --quiet --workspace --bins --example logits
built=${CARGO_TARGET_DIR:-target}/debug
rollflow() { "$built/rollflow" "$@"; }
check() {
  "$built/examples/logits" "$1" "3+4=" "9+9=" "0+0=" > "$work/logits"
  python check "$1" "$work/logits"
}
python() { env "${paths[@]}" python3 scripts/check_export.py "$@" 2> "$work/errors" || { tail -n 20 "$work/errors" >&2; exit 1; }; }
train() {
  rollflow run "pipelines/recipes/$1.toml" --out "$work/$2" --set observe.progress=false "${@:3}" > "$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
}
reinforced=(--set train.steps=4 --set train.lr=1e-3)

train sft_then_grpo whole "${reinforced[@]}"
check "$work/whole/checkpoints/step_000004"
rollflow export "$work/whole" "$work/shards" --max-shard-size 1MB
check "$work/shards"
rollflow export "$work/whole" "$work/half" --dtype bf16
check "$work/half"

train sft_then_grpo lora "${reinforced[@]}" --set "lora={rank=8,alpha=16}"
check "$work/lora/checkpoints/step_000004"
rollflow export "$work/lora" "$work/merged"
check "$work/merged"
rollflow export "$work/lora" "$work/adapter" --adapter
check "$work/adapter"

# A reward model's adapters and head.
train reward_model judge --set reward_model.steps=20 --set "lora={rank=8,alpha=16}"
rollflow export "$work/judge" "$work/judge-whole"
python classify "$work/judge/checkpoints/step_000020" "$work/judge-whole"
python adapt "$work/judge/base" "$work/their-judge"
rollflow export "$work/their-judge" "$work/their-judge-whole"
python classify "$work/their-judge" "$work/their-judge-whole"

# A family that holds several projections as one tensor. A random model earns nothing: it imitates.
phi3=$PWD/tests/golden/models/phi3
train sft phi3 --set sft.steps=20 --set "model={kind='folder',path='$phi3'}" --set "lora={rank=8,alpha=16}"
check "$work/phi3/checkpoints/step_000020"
rollflow export "$work/phi3" "$work/merged-phi3"
check "$work/merged-phi3"

# And what PEFT writes, rollflow reads.
python adapt "$work/whole/checkpoints/step_000004" "$work/theirs"
check "$work/theirs"
python adapt "$phi3" "$work/theirs-phi3"
check "$work/theirs-phi3"
echo "transformers and PEFT agree with rollflow"
