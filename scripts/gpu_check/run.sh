#!/usr/bin/env bash
# Checks a machine with an NVIDIA GPU, in about 20 minutes, and writes one Markdown page of figures:  ./run.sh [PAGE] [PART]...
# Parts: tests, speed, runs, probe; all unless named. Fails if a test, a measurement or a run does. The largest sizes of `speed` need 80 GB.
#
# Needs libtorch 2.11.0 with its CUDA half: in the folder LIBTORCH, or as PyTorch in python3, which the probe uses.
set -uo pipefail
cd "$(dirname "$0")"

page=$(realpath -m "${1:-gpu-check.md}")
shift || true
parts=${*:-tests speed runs probe}

torch=${LIBTORCH:+$LIBTORCH/lib}
torch=${torch:-$(python3 -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "lib"))' 2> /dev/null)}
if [ ! -e "$torch/libtorch_cuda.so" ]; then
  echo "${torch:-the torch of python3} has no libtorch_cuda.so; install torch 2.11.0 for CUDA 13, or set LIBTORCH to the folder of a libtorch 2.11.0 with CUDA" >&2
  exit 1
fi
export LD_LIBRARY_PATH=$torch ROLLFLOW_REQUIRE_GPU=1
failed=0

section() { printf '\n## %s\n\n' "$1" >> "$page"; }

# Runs a command for at most so many seconds; its last lines go to the page. The first argument is what is said of it.
shown() {
  local what=$1 seconds=$2 lines=$3
  shift 3
  local output rc
  output=$(timeout "$seconds" "$@" 2>&1)
  rc=$?
  { printf '%s (exit status %s):\n\n```text\n' "$what" "$rc"; tail -n "$lines" <<< "$output"; printf '```\n\n'; } >> "$page"
  echo "$what: exit status $rc"
  return $rc
}

{
  printf '# rollflow on a GPU\n\n'
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
  printf '\n'
} > "$page"

for part in $parts; do
  case $part in
    tests)
      section "Tests"
      # libtorch's CUDA library first, so that no test asks for devices before it is there.
      export LD_PRELOAD=$torch/libtorch_cuda.so
      # shellcheck disable=SC2046
      shown "Our kernels against f64, and what else the library has for GPUs" 600 12 bin/library --test-threads 1 $(cat library_tests) || failed=1
      shown "Golden models in f32" 300 12 bin/golden_models --test-threads 1 || failed=1
      shown "Formats, devices, and all golden models in bf16" 300 90 bin/models --test-threads 1 --nocapture precision:: devices:: gpu:: quantised:: gpt_oss:: || failed=1
      unset LD_PRELOAD
      ;;
    speed)
      section "Speed"
      for size in "half-billion 64" "half-billion 256" "half-billion 1024" "one-and-a-half 256" "seven-lora 64" "seven-lora 256" "seven-qlora 64" "mixture 256" "seven-mixture 64" "delta-net 64"; do
        # shellcheck disable=SC2086
        shown "$size" 150 12 bin/device cuda bf16 $size || failed=1
      done
      shown "half-billion 64, 8192 tokens each" 150 12 bin/device cuda bf16 half-billion 64 7936 || failed=1
      shown "Turns and drafts" 150 45 bin/reuse cuda bf16 896 24 || failed=1
      ;;
    runs)
      section "Runs"
      recipe=(run pipelines/recipes/grpo.toml --set model.device=cuda)
      for set in "model.dtype=f32" "model.dtype=bf16" "flow.max_staleness=0" "train.gradient_checkpointing=true" "generate.top_p=0.95"; do
        shown "grpo.toml with $set" 120 12 bin/rollflow "${recipe[@]}" --set "$set" --set train.steps=200 || failed=1
      done
      ;;
    probe)
      section "What this GPU and libtorch reach"
      shown "0.5B" 120 30 python3 probe.py
      shown "7B" 120 30 python3 probe.py 7b
      ;;
  esac
done
echo "written: $page"
exit $failed
