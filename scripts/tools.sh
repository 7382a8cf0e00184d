#!/usr/bin/env bash
# Names every tool that is missing, all at once, with the command that installs it. Installs nothing.
set -u
missing=0
need() { # need TOOL HOW
  command -v "$1" >/dev/null 2>&1 && return
  missing=1
  printf 'missing: %-9s install it with: %s\n' "$1" "$2" >&2
}
if command -v apt-get >/dev/null 2>&1; then packages="sudo apt-get install"; else packages="your package manager:"; fi
need cargo "the installer at https://rustup.rs"
need c++ "$packages g++"
need python3 "$packages python3 python3-pip python3-venv"
if command -v python3 >/dev/null 2>&1 && ! python3 -m pip --version >/dev/null 2>&1; then
  missing=1; printf 'missing: %-9s install it with: %s\n' pip "$packages python3-pip python3-venv" >&2
fi
if command -v cargo >/dev/null 2>&1; then
  want=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -1)
  have=$(rustc --version | awk '{print $2}')
  if [ "$(printf '%s\n%s\n' "$want" "$have" | sort -V | head -1)" != "$want" ]; then
    missing=1; printf 'Rust %s is older than %s: rustup update stable\n' "$have" "$want" >&2
  fi
fi
exit $missing
