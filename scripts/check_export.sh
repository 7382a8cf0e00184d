#!/usr/bin/env bash
# Trains a little, exports, and loads everything that was written with transformers and PEFT: their logits and token ids must be ours.
#
#   scripts/check_export.sh
#
# They go into ${ROLLFLOW_CACHE:-~/.cache/rollflow}/transformers (a virtual environment, once). EXPORT_ENV names a script to source instead, for a
# machine that has them.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${ROLLFLOW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rollflow}

if [ -n "${EXPORT_ENV:-}" ]; then
  . "$EXPORT_ENV"
else
  venv=$cache/transformers
  if [ ! -e "$venv/complete" ]; then
    echo "installing transformers and PEFT into $venv" >&2
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
    touch "$venv/complete"
  fi
  . "$venv/bin/activate"
fi
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rollflow() { cargo run --quiet --package rollflow-pipelines -- "$@"; }
check() {
  cargo run --quiet --example logits -- "$1" "3+4=" "9+9=" "0+0=" > "$work/logits"
  python3 scripts/check_export.py "$1" "$work/logits" --tolerance "${2:-1e-4}"
}
train() {
  rollflow run pipelines/recipes/sft_then_grpo.toml --out "$work/$1" --set train.steps=4 --set train.lr=1e-3 --set observe.progress=false "${@:2}" > "$work/log" 2>&1 \
    || { cat "$work/log" >&2; exit 1; }
}

train whole
check "$work/whole/checkpoints/step_000004"
rollflow export "$work/whole" "$work/shards" --max-shard-size 1MB
check "$work/shards"
rollflow export "$work/whole" "$work/half" --dtype bf16
check "$work/half"

train lora --set "lora={rank=8,alpha=16}"
check "$work/lora/checkpoints/step_000004"
rollflow export "$work/lora" "$work/merged"
check "$work/merged"
rollflow export "$work/lora" "$work/adapter" --adapter
check "$work/adapter"
echo "transformers and PEFT agree with rollflow"
