#!/usr/bin/env bash
# Builds and runs a crate outside the workspace from the files that docs/how_to/library.md shows, as a reader would. Reuses what CARGO_TARGET_DIR
# holds (target/ by default): dependencies are not compiled again, as long as versions and profile are the workspace's.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/mine"

# Each file is a block of code after a line that is its name.
awk -v to="$folder/mine/" '
  /^`[^`]+`:$/ { file = substr($0, 2, length($0) - 3); next }
  /^```/ && open { close(file); open = 0; file = ""; next }
  /^```/ && file { file = to file; folder = file; sub(/[^\/]*$/, "", folder); system("mkdir -p " folder); open = 1; next }
  open { print > file }
' docs/how_to/library.md
for file in Cargo.toml build.rs src/main.rs .cargo/config.toml; do
    [ -s "$folder/mine/$file" ] || { echo "outside_crate.sh: docs/how_to/library.md does not show $file" >&2; exit 1; }
done

# The clone next to it is this one. The same versions, so that no registry has to be asked.
sed -i "s|path = \"../rollflow\"|path = \"$root\"|" "$folder/mine/Cargo.toml"
cp Cargo.lock "$folder/mine/"
./scripts/libtorch.sh "$folder/mine"

cd "$folder/mine"
# The workspace itself is built by the same settings. Its folder for the same libtorch keeps what is compiled already.
diff <(grep -v '^#' "$root/.cargo/config.toml") .cargo/config.toml
[ "$(readlink -f .libtorch)" = "$(readlink -f "$root/.libtorch")" ] || { echo "outside_crate.sh: another libtorch was linked" >&2; exit 1; }
export LIBTORCH=$root/.libtorch
# Started without a path to libraries.
unset LIBTORCH_USE_PYTORCH LD_LIBRARY_PATH
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}
cargo build --config profile.dev.opt-level=1
"$CARGO_TARGET_DIR/debug/mine"
echo "a crate outside the workspace builds and runs"

# A message without `impl Message` is a compile error that says what to write.
cp "$root/tests/compile_fail/no_message.rs" src/main.rs
if cargo build --config profile.dev.opt-level=1 2> errors.txt; then
    echo "outside_crate.sh: a type without \`impl Message\` compiles as a message" >&2
    exit 1
fi
for part in "\`Word\` can't travel over an edge: it is not a \`Message\`" "impl rollflow::flow::Message for Word {}"; do
    grep -qF "$part" errors.txt || { cat errors.txt >&2; echo "outside_crate.sh: the error does not say: $part" >&2; exit 1; }
done
echo "a type without impl Message is rejected with what to write"
