#!/usr/bin/env bash
# Brings libtorch to this machine and links it as .libtorch in the repository, where .cargo/config.toml looks for it.
# With a folder as its argument, it links it there instead: scripts/libtorch.sh ~/my_crate
#
#   a user's own LIBTORCH            is linked as it is
#   a user's own LIBTORCH_USE_PYTORCH is resolved to the torch of that python and linked
#   otherwise                        PyPI's torch wheel goes into ${ROLLFLOW_CACHE:-~/.cache/rollflow}, once per user,
#                                    and a CPU view of it is made (the wheel's own libtorch.so wants all of NVIDIA's libraries)
#
# Idempotent, safe to run twice at once; about a minute and 1.2 GB the first time, nothing afterwards.
# Where nvidia-smi lists a GPU, or with ROLLFLOW_CUDA=1, NVIDIA's libraries come too (2.7 GB more; ROLLFLOW_CUDA=0: never), which libtorch's CUDA half needs.
set -euo pipefail
scripts=$(cd "$(dirname "$0")" && pwd)
cd "${1:-$scripts/..}"

version=2.11.0
wheels=("torch==$version" nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85)
# What that wheel asks for, but for what only Python uses.
nvidia=("cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==13.0.2"
  nvidia-cudnn-cu13==9.19.0.56 nvidia-cusparselt-cu13==0.8.0 nvidia-nccl-cu13==2.28.9 nvidia-nvshmem-cu13==3.4.5)

# As root, pip would warn.
export PIP_ROOT_USER_ACTION=ignore
# Wheels for CPython 3.12, whichever python3 runs pip: no Python code of theirs is run.
fetch() { # fetch FOLDER WHEEL…
  local platforms=()
  for of in $(seq -f manylinux_2_%g 28 -1 5) manylinux2014 manylinux2010 manylinux1; do platforms+=(--platform "${of}_x86_64"); done
  python3 -m pip install --no-compile --disable-pip-version-check --only-binary :all: --implementation cp --python-version 3.12 --abi cp312 \
    "${platforms[@]}" --target "$@" >&2
}

say() { printf '\033[2mlibtorch:\033[0m %s\n' "$*" >&2; }
die() { printf 'libtorch: %s\n' "$1" >&2; shift; for line in "$@"; do printf '  %s\n' "$line" >&2; done; exit 1; }
link() { [ "$(readlink .libtorch 2>/dev/null || true)" = "$1" ] || ln -sfn "$1" .libtorch; }

if [ -n "${LIBTORCH:-}" ]; then
  [ -d "$LIBTORCH/lib" ] || die "LIBTORCH=$LIBTORCH holds no lib folder" "point it at a libtorch $version, or unset it"
  link "$(cd "$LIBTORCH" && pwd -P)"; say "using LIBTORCH=$LIBTORCH"; exit 0
fi
if [ -n "${LIBTORCH_USE_PYTORCH:-}" ]; then
  root=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))') \
    || die "LIBTORCH_USE_PYTORCH is set, but python3 can't import torch" "pip install torch==$version, or unset it"
  link "$root"; say "using the torch of $(command -v python3)"; exit 0
fi

command -v python3 >/dev/null || die "python3 is missing" "Debian, Ubuntu: sudo apt-get install python3 python3-pip python3-venv"
python3 -m pip --version >/dev/null 2>&1 || die "pip is missing" "Debian, Ubuntu: sudo apt-get install python3-pip"
[ "$(uname -sm)" = "Linux x86_64" ] || die "no recipe for $(uname -sm)" "install libtorch $version and set LIBTORCH to its folder"

home=${ROLLFLOW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rollflow}/libtorch-$version
view=$home/view
verified() { [ -f "$home/complete" ] && [ -f "$view/lib/libtorch_cpu.so" ] && [ -f "$view/include/torch/csrc/api/include/torch/torch.h" ]; }

if ! verified; then
  mkdir -p "$home"
  exec 9>"$home/lock"
  flock 9
  if ! verified; then
    say "fetching torch $version into $home (530 MB, once per user)"
    rm -rf "$home/wheel" "$view" "$home/complete" "$home/cuda"
    fetch "$home/wheel" --no-deps "${wheels[@]}" || die "pip could not fetch ${wheels[*]}" "check the network or pip's index settings, then run this again"
    torch=$home/wheel/torch cuda=$home/wheel/nvidia/cu13/lib
    mkdir -p "$view/lib"
    ln -s "$torch/include" "$view/include"
    for lib in libtorch_cpu.so libc10.so libgomp.so.1; do ln -s "$torch/lib/$lib" "$view/lib/$lib"; done
    ln -s libgomp.so.1 "$view/lib/libgomp.so"
    for lib in libcudart.so.13 libcupti.so.13; do ln -s "$cuda/$lib" "$view/lib/$lib"; done
    echo 'INPUT(-ltorch_cpu)' > "$view/lib/libtorch.so"
    echo "$version" > "$view/build-version"
    for lib in libtorch_cpu.so libc10.so libgomp.so.1 libcudart.so.13 libcupti.so.13; do
      [ -e "$view/lib/$lib" ] || die "$lib did not arrive with the wheels" "remove $home and run this again"
    done
    date -u +%FT%TZ > "$home/complete"
    say "installed"
  fi
fi

wants_cuda() { [ "${ROLLFLOW_CUDA:-}" = 1 ] || { [ -z "${ROLLFLOW_CUDA:-}" ] && nvidia-smi -L 2>/dev/null | grep -q GPU; }; }
if wants_cuda && [ ! -f "$home/cuda" ]; then
  exec 9>"$home/lock"
  flock 9
  if [ ! -f "$home/cuda" ]; then
    say "fetching NVIDIA's libraries into $home (2.7 GB, once per user)"
    rm -rf "$home/nvidia"
    fetch "$home/nvidia" "${nvidia[@]}" || die "pip could not fetch ${nvidia[*]}" "check the network or pip's index settings, or go on without a GPU: ROLLFLOW_CUDA=0"
    # Where libtorch_cuda.so looks for them.
    rm -rf "$home/wheel/nvidia"
    mv "$home/nvidia/nvidia" "$home/wheel/nvidia"
    rm -rf "$home/nvidia"
    date -u +%FT%TZ > "$home/cuda"
    say "installed"
  fi
fi
link "$view"
# For runs of several ranks.
if wants_cuda; then
  "$scripts/nccl.sh" || say "several ranks on GPUs need NCCL's part, which is missing: run make nccl. A single GPU needs no NCCL"
fi
