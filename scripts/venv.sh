# Sourced: Python environments in ${ROLLFLOW_CACHE:-~/.cache/rollflow}, each installed once per user.
cache=${ROLLFLOW_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rollflow}

# Installs packages into the environment $venv:  pip [OPTION…] PACKAGE…
pip() { "$venv/bin/pip" install --quiet --disable-pip-version-check "$@"; }

# Sets $venv to the folder of the environment NAME. The first time, creates it and runs COMMAND, which installs:  venv NAME COMMAND…
venv() {
  venv=$cache/$1
  [ ! -e "$venv/complete" ] || return 0
  mkdir -p "$cache"
  exec 9> "$venv.lock"
  flock 9
  if [ ! -e "$venv/complete" ]; then
    echo "installing $1 into $cache" >&2
    python3 -m venv "$venv"
    "${@:2}"
    touch "$venv/complete"
  fi
  exec 9>&-
}
