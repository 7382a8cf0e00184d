#!/usr/bin/env bash
# Packs what checks a machine with an NVIDIA GPU and no network: programs, tests, golden models and scripts, in target/gpu-check.tar.xz. There, with the same
# libtorch (LIBTORCH, or PyTorch in python3):  tar xf gpu-check.tar.xz && gpu-check/run.sh
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-target}
built() { # the executable of a target, which cargo builds by the other arguments
  local name=$1
  shift
  "$@" --message-format=json | python3 -c '
import json, sys
found = [json.loads(line) for line in sys.stdin if line.startswith("{")]
print([of["executable"] for of in found if of.get("executable") and of["target"]["name"] == sys.argv[1]][-1])' "$name"
}

folder=$target/gpu-check
rm -rf "$folder" && mkdir -p "$folder/bin" "$folder/tests/golden" "$folder/pipelines/recipes"
cp "$(built rollflow cargo build --release --workspace --bin rollflow)" "$folder/bin/rollflow"
for bench in device reuse; do
  cp "$(built "$bench" cargo bench --workspace --bench "$bench" --no-run)" "$folder/bin/$bench"
done
cp "$(built rollflow cargo test --workspace --lib --no-run)" "$folder/bin/library"
for test in models golden_models; do
  cp "$(built "$test" cargo test --workspace --test "$test" --no-run)" "$folder/bin/$test"
done
strip "$folder"/bin/*
cp -r tests/golden/{models,bitsandbytes,mxfp4} "$folder/tests/golden/"
cp pipelines/recipes/grpo.toml "$folder/pipelines/recipes/"
cp scripts/gpu_check/* "$folder/"
tar cf - -C "$target" gpu-check | xz -T0 --x86 --lzma2=preset=9e > "$target/gpu-check.tar.xz"
size=$(stat -c %s "$target/gpu-check.tar.xz")
echo "$target/gpu-check.tar.xz: $((size >> 20)) MiB"
if [ "$size" -gt $((60 << 20)) ]; then
  echo "it is larger than 60 MiB" >&2
  exit 1
fi
