#!/usr/bin/env bash
# The Tinker API with real clients and a real server: installs SkyRL 0.3 on JAX, two SDKs and tinker-cookbook (8 GB and some minutes,
# once), makes their calls against `rollflow serve --tinker`, and trains on SkyRL with one and with two devices.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${ROLLFLOW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rollflow}
server=$cache/tinker-skyrl-0.3.0 client=$cache/tinker-sdk-0.38.0
pip() { "$1/bin/pip" install -q --disable-pip-version-check "${@:2}"; }
if [ ! -e "$server/complete" ]; then
  echo "installing SkyRL into $server" >&2
  python3 -m venv "$server"
  pip "$server" 'skyrl[tinker,jax]==0.3.0' tinker==0.18.0 orjson uv
  # pydantic wants typing_extensions' TypedDict before Python 3.12.
  python3 scripts/tinker/typed_dict.py "$server"/lib/python3*/site-packages/skyrl
  touch "$server/complete"
fi
if [ ! -e "$client/complete" ]; then
  echo "installing tinker-cookbook into $client" >&2
  python3 -m venv "$client"
  # torch and transformers are those of the server.
  printf '%s\n' "$server"/lib/python3*/site-packages > "$(echo "$client"/lib/python3*/site-packages)/server.pth"
  pip "$client" tinker==0.38.0
  pip "$client" --no-deps tinker-cookbook==0.6.1 chz==0.4.0 blobfile==3.3.0 pyrage termcolor tiktoken tml-renderers cloudpickle lxml \
    pycryptodomex sympy mpmath pylatexenc math-verify latex2sympy2_extended antlr4-python3-runtime==4.13.2
  touch "$client/complete"
fi
cargo build --release --package rollflow-pipelines --bin rollflow
cargo test --test training --no-run
python3 scripts/tinker/test.py "$server" "$client"
