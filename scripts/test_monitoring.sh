#!/usr/bin/env bash
# Watches a run by a real Prometheus, which comes from Debian: rules and their tests, and every query of the dashboard, whose form Grafana's
# types know. Exports to a collector that decodes by OpenTelemetry's own messages. The types and the messages come from PyPI.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v prometheus promtool > /dev/null; then
  echo "installing prometheus" >&2
  apt-get install -y --no-install-recommends prometheus > /dev/null
fi
. scripts/venv.sh
venv monitoring-1 pip grafana-foundation-sdk opentelemetry-proto trustme
"$venv/bin/python" scripts/check_dashboard.py monitoring/dashboard.json
scrapes=$(mktemp -d)
trap 'rm -rf "$scrapes"' EXIT
ROLLFLOW_SCRAPE=$scrapes/every_metric cargo test --quiet --workspace --test recipes a_scrape_shows_every_recorded_metric
ROLLFLOW_SCRAPE=$scrapes/live_run cargo test --quiet --workspace --test command a_live_run_is_scraped
for scrape in "$scrapes"/*; do
  complaints=$(promtool check metrics < "$scrape" 2>&1) || true
  [ -z "$complaints" ] || { echo "$complaints" >&2; exit 1; }
done
cargo build --workspace --bins
python3 scripts/test_monitoring.py "${CARGO_TARGET_DIR:-target}/debug/rollflow"

cargo build --workspace --bins --features rollflow-pipelines/otlp
"$venv/bin/python" scripts/test_otlp.py "${CARGO_TARGET_DIR:-target}/debug/rollflow"
