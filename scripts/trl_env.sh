# Sourced: puts a Python with TRL first in PATH, that of $TRL_ENV or one in the cache.
if [ -n "${TRL_ENV:-}" ]; then
  . "$TRL_ENV"
else
  . scripts/venv.sh
  venv trl pip torch==2.13.0 transformers==5.23.0 trl==1.16.0 datasets accelerate
  . "$venv/bin/activate"
fi
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
