#!/usr/bin/env bash
# Lints scrapes of /metrics with Prometheus' own checker: scripts/promtool.sh [SCRAPE_FILE...]
# Without a file it makes two: one of every metric there is, and one of a short live run. Any complaint fails.
# Debian's package "prometheus" holds promtool; root gets it installed, others are told how.
set -euo pipefail

if ! command -v promtool >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "promtool.sh: promtool is missing; install it with: sudo apt-get install --no-install-recommends prometheus" >&2
        exit 2
    fi
    apt-get update -q >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends prometheus >&2
fi

if [ $# = 0 ]; then
    cd "$(dirname "$0")/.."
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    ROLLFLOW_SCRAPE=$folder/every_metric cargo test --quiet --workspace --test recipes a_scrape_shows_every_recorded_metric
    ROLLFLOW_SCRAPE=$folder/live_run cargo test --quiet --workspace --test command a_live_run_is_scraped
    set -- "$folder/every_metric" "$folder/live_run"
fi

for scrape in "$@"; do
    if [ ! -s "$scrape" ]; then
        echo "promtool.sh: $scrape is missing or empty; without arguments this script makes its own" >&2
        exit 2
    fi
    complaints=$(promtool check metrics <"$scrape" 2>&1) || { echo "$complaints" >&2; exit 1; }
    if [ -n "$complaints" ]; then
        echo "$complaints" >&2
        exit 1
    fi
    echo "promtool has no complaints about $(grep -c '^# TYPE' "$scrape") metrics of $(basename "$scrape")"
done
