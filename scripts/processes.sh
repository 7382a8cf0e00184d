# Sourced by tests that start processes. When the script ends, it kills the processes in `ended` and removes $work (KEEP=1 keeps it).
work=$(mktemp -d)
ended=()
finish() { for pid in "${ended[@]}"; do kill "$pid" 2> /dev/null || true; done; [ -n "${KEEP:-}" ] || rm -rf "$work" 2> /dev/null || { sleep 2; rm -rf "$work"; }; }
trap finish EXIT
die() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; exit 1; }
# Waits until a command succeeds:  within SECONDS COMMAND…
within() { local tries=$1; shift; until "$@"; do [ $((tries -= 1)) -gt 0 ] || die "never: $*"; sleep 1; done; }
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# PREBUILT names a program to test instead.
[ -n "${PREBUILT:-}" ] || cargo build --quiet --workspace --bins
rollflow=$(realpath "${PREBUILT:-${CARGO_TARGET_DIR:-target}/debug/rollflow}")
