#!/usr/bin/env bash
# Compiles what ranks on GPUs exchange numbers with (src/ranks/nccl.cpp) next to libtorch, where programs look for it:  scripts/nccl.sh
#
# Needs libtorch with its CUDA half (ROLLFLOW_CUDA=1 scripts/libtorch.sh, which runs this too). NVIDIA's headers come from PyPI into
# ${ROLLFLOW_CACHE:-~/.cache/rollflow}, once per user (1.3 GB to fetch, 60 MB to keep). ROLLFLOW_NCCL_OUT=FILE writes it elsewhere.
set -euo pipefail
cd "$(dirname "$0")/.."

# Those of torch 2.11.0, whose process group holds NCCL's settings by value.
wheels=(nvidia-nccl-cu13==2.28.9 nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85
  nvidia-cublas==13.1.0.3 nvidia-cusolver==12.0.4.66 nvidia-cusparse==12.6.3.3)
headers=${ROLLFLOW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rollflow}/nccl-2.28.9

say() { printf '\033[2mnccl:\033[0m %s\n' "$*" >&2; }
die() { printf 'nccl: %s\n' "$1" >&2; shift; for line in "$@"; do printf '  %s\n' "$line" >&2; done; exit 1; }

[ -e .libtorch/lib/libtorch_cpu.so ] || die "there is no libtorch here" "run make libtorch"
libtorch=$(readlink -f .libtorch)
lib=$(dirname "$(readlink -f "$libtorch/lib/libtorch_cpu.so")")
out=${ROLLFLOW_NCCL_OUT:-$lib/librollflow_nccl.so}
[ -e "$lib/libtorch_cuda.so" ] || die "this libtorch came without its CUDA half" "install torch 2.11.0 for CUDA 13, or unset LIBTORCH and run make libtorch"
[ -n "$(find "$out" -newer src/ranks/nccl.cpp -newer src/ranks/device.hpp 2> /dev/null)" ] && exit 0
[ -w "$(dirname "$out")" ] || die "cannot write to $(dirname "$out")" "make it writable, or set ROLLFLOW_NCCL_OUT to ${out##*/} in the program's folder"

if [ ! -f "$headers/complete" ]; then
  mkdir -p "$headers"
  exec 9> "$headers/lock"
  flock 9
  if [ ! -f "$headers/complete" ]; then
    say "fetching NVIDIA's headers into $headers"
    fetched=$(mktemp -d "$headers/fetched.XXXX")
    trap 'rm -rf "$fetched"' EXIT
    python3 -m pip download --no-deps --disable-pip-version-check --quiet --dest "$fetched" "${wheels[@]}" >&2 \
      || die "pip could not fetch ${wheels[*]}" "check the network or pip's index settings, then run this again"
    python3 - "$fetched" "$headers" <<'PY'
import pathlib, sys, zipfile
for wheel in pathlib.Path(sys.argv[1]).glob("*.whl"):
    with zipfile.ZipFile(wheel) as files:
        files.extractall(sys.argv[2], [name for name in files.namelist() if "/include/" in name])
PY
    touch "$headers/complete"
  fi
fi

c++ -std=c++20 -O2 -Wno-interference-size -shared -fPIC -I "$libtorch/include" -I "$libtorch/include/torch/csrc/api/include" \
  -I "$headers/nvidia/cu13/include" -I "$headers/nvidia/nccl/include" src/ranks/nccl.cpp -o "$out.$$" -Wl,-rpath,"$lib" \
  || die "src/ranks/nccl.cpp does not compile" "is $libtorch libtorch 2.11.0?"
mv "$out.$$" "$out"
say "compiled $out"
