#!/usr/bin/env bash
# The Tinker API with real clients and a real server: installs SkyRL 0.3 on JAX, two SDKs and tinker-cookbook (8 GB and some minutes,
# once), makes their calls against `rollflow serve --tinker`, and trains on SkyRL with one and with two devices.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
skyrl() {
  pip 'skyrl[tinker,jax]==0.3.0' tinker==0.18.0 orjson uv
  # pydantic wants typing_extensions' TypedDict before Python 3.12.
  python3 scripts/tinker/typed_dict.py "$venv"/lib/python3*/site-packages/skyrl
}
clients() {
  # torch and transformers are those of the server.
  printf '%s\n' "$server"/lib/python3*/site-packages > "$(echo "$venv"/lib/python3*/site-packages)/server.pth"
  pip tinker==0.38.0
  pip --no-deps tinker-cookbook==0.6.1 chz==0.4.0 blobfile==3.3.0 pyrage termcolor tiktoken tml-renderers cloudpickle lxml \
    pycryptodomex sympy mpmath pylatexenc math-verify latex2sympy2_extended antlr4-python3-runtime==4.13.2
}
venv tinker-skyrl-0.3.0 skyrl
server=$venv
venv tinker-sdk-0.38.0 clients
cargo build --release --package rollflow-pipelines --bin rollflow
cargo test --test training --no-run
python3 scripts/tinker/test.py "$server" "$venv"
