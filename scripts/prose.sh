#!/usr/bin/env bash
# Checks the spelling (typos, typos.toml) and the words (scripts/words.py) of comments, help and documents.
# typos is $TYPOS, or the machine's own, or the wheel of PyPI, installed once per user.
set -euo pipefail
cd "$(dirname "$0")/.."
version=1.52.0
typos=${TYPOS:-$(command -v typos || true)}
if [ -z "$typos" ]; then
    . scripts/venv.sh
    venv "typos-$version" pip --only-binary :all: "typos==$version"
    typos=$venv/bin/typos
fi
"$typos" --format brief
python3 scripts/words.py
