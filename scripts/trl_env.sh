# Sourced: puts a Python with TRL first in PATH, that of $TRL_ENV or one in the cache.
cache=${ROLLFLOW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rollflow}

if [ -n "${TRL_ENV:-}" ]; then
  . "$TRL_ENV"
else
  venv=$cache/trl
  if [ ! -e "$venv/complete" ]; then
    echo "installing TRL into $venv" >&2
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 trl==1.16.0 datasets accelerate
    touch "$venv/complete"
  fi
  . "$venv/bin/activate"
fi
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
