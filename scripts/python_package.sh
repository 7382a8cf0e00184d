#!/usr/bin/env bash
# Builds the Python package as a wheel, installs it into a new environment, and runs its tests and a command there.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Building writes next to the sources.
cp -r python "$work/package"
python3 -m venv "$work/venv"
"$work/venv/bin/pip" wheel -q --disable-pip-version-check --no-deps --wheel-dir "$work" "$work/package"
"$work/venv/bin/pip" install -q --disable-pip-version-check "$work"/rollflow-*.whl
# Away from the sources, so that the tests import what is installed.
mv "$work/package/tests" "$work/tests"
cd "$work"
"$work/venv/bin/python" -m unittest discover --quiet --start-directory tests
"$work/venv/bin/python" -m rollflow.serve_env --help > /dev/null
"$work/venv/bin/python" -c 'import rollflow, os; print(rollflow.__version__, os.path.dirname(rollflow.__file__))'
