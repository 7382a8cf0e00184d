#!/usr/bin/env bash
# Checks the spelling (typos, typos.toml) and the words (scripts/words.py) of comments, help and documents.
# typos is $TYPOS, or the machine's own, or the wheel of PyPI, installed once per user.
set -euo pipefail
cd "$(dirname "$0")/.."
version=1.52.0
typos=${TYPOS:-$(command -v typos || true)}
if [ -z "$typos" ]; then
    home=${ROLLFLOW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rollflow}/typos-$version
    typos=$home/bin/typos
    if [ ! -x "$typos" ]; then
        python3 -m venv "$home"
        "$home/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: "typos==$version"
    fi
fi
"$typos" --format brief
python3 scripts/words.py
