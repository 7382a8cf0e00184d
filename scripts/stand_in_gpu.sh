#!/usr/bin/env bash
# Runs on "cuda", where there is no GPU, what the project does there: training, generation and scoring on one device and on several, resumed, evaluated and
# exported. The GPU is a stand-in (tests/stand_in_gpu): libtorch's operations are the processor's, and our kernels run as fibres. It shows that every tensor is
# where its operation is, that streams are in order, and what a step starts, waits for and takes; speed it can't show. With `quick`, without whole runs. With `library`,
# prints the path of the stand-in alone.
set -euo pipefail
cd "$(dirname "$0")/.."

libtorch=$(readlink -f .libtorch)
folder=${CARGO_TARGET_DIR:-target}/stand_in_gpu
mkdir -p "$folder"
# By the name of what it stands in for: who asks for CUDA then finds it loaded.
library=$(cd "$folder" && pwd)/libtorch_cuda.so
if [ ! -e "$library" ] || [ -n "$(find tests/stand_in_gpu src/model/allocator.hpp src/ranks/device.hpp src/ranks/stand_ins -newer "$library" -type f)" ]; then
  c++ -std=c++20 -O1 -shared -fPIC -DFIBRES="\"$PWD/tests/stand_in_gpu\"" -I src/ranks/stand_ins -I src/ranks -I "$libtorch/include" -I "$libtorch/include/torch/csrc/api/include" \
    tests/stand_in_gpu/*.cpp -o "$library" -L "$libtorch/lib" -ltorch_cpu -lc10 -Wl,-rpath,"$libtorch/lib"
fi

if [ "${1:-}" = library ]; then
  echo "$library"
  exit
fi
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="env LD_PRELOAD=$library"
export ROLLFLOW_REQUIRE_GPU=1
cargo test --workspace --test golden_models
cargo test --workspace --test models -- precision:: devices:: gpu:: quantised:: gpt_oss:: memory::a_trainer_on_a_gpu memory::a_generator_on_a_gpu
# shellcheck disable=SC2046
cargo test --workspace --lib -- $(cat scripts/gpu_check/library_tests)
if [ "${1:-}" = quick ]; then
  exit
fi
# All recipes on it, whatever they say themselves. What they expect is of f32, which a GPU is not given by itself.
ROLLFLOW__MODEL__DEVICE=cuda ROLLFLOW__MODEL__DTYPE=f32 cargo test --workspace --test command -- \
  asking:: devices:: references:: reward_models:: recipes::every_shipped evaluating::runs_without \
  adapters::a_critic adapters::adapters_are_exported crashes::a_run_that_was_killed crashes::a_run_with_a_critic ranks:: file_faults::ranks_that_do_not_see
