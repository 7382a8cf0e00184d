#!/usr/bin/env bash
# Runs the same GRPO and SFT work with TRL and with rollflow, one after the other on this machine, and prints the ratios, and our share of the machine's matrix rate.
# GRPO has two rows: rollflow with a staleness of at most one version, and synchronous as TRL's GRPOTrainer is. TRL computes in f32, rollflow in f32 and bf16.
#
#   scripts/versus_trl.sh [ROUNDS]
#
# TRL goes into a virtual environment in ${ROLLFLOW_CACHE:-~/.cache/rollflow}/trl (2 GB, a few minutes, once). TRL_ENV names a script to
# source instead, for a machine that has one. Other load on the machine ruins two-thread figures: each round prints the load.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-2}
. scripts/trl_env.sh

cargo bench --bench versus_trl --no-run 2>/dev/null
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Of supervised training, tokens: full rows on both sides.
rate() { tail -n 1 "$1" | python3 -c 'import json, sys; of = json.load(sys.stdin); print(of["steps_per_s"] if of["what"].startswith("grpo") else of["trained_tokens_per_s"])'; }
load() { cut -d" " -f1 /proc/loadavg; }

for round in $(seq "$rounds"); do
  for run in "grpo tiny 63 200" "grpo_sync tiny 63 200" "sft tiny 63 200 64 64" "grpo mid 4 8 64" "grpo_sync mid 4 8 64" "sft mid 13 30 128 16"; do
    read -r what preset trl_steps steps sizes <<< "$run"
    unit=$([ "${what%_sync}" = grpo ] && echo steps/s || echo "trained tokens/s")
    best=0
    for threads in 1 2; do
      python3 benches/trl_side.py "${what%_sync}" --preset "$preset" --steps "$trl_steps" --threads "$threads" --out "$work/model" > "$work/trl" 2> "$work/trl.log" \
        || { tail -n 20 "$work/trl.log" >&2; exit 1; }
      speed=$(rate "$work/trl")
      echo "round $round  $what $preset  TRL, $threads threads   $speed $unit (load $(load))"
      best=$(python3 -c "print(max($best, $speed))")
    done
    for format in f32 bf16; do
      cargo bench --quiet --bench versus_trl -- "$what" "$work/model@$format" "$steps" $sizes > "$work/ours" 2> "$work/ours.log" \
        || { tail -n 20 "$work/ours.log" >&2; exit 1; }
      speed=$(rate "$work/ours")
      share=$(tail -n 1 "$work/ours" | python3 -c 'import json, sys; of = json.load(sys.stdin); print("{:.0%} of {gflops} GFLOP/s".format(of["matrix_share"], **of))')
      echo "round $round  $what $preset  rollflow in $format   $speed $unit, $share (load $(load))"
      python3 -c "print(f'round $round  $what $preset  ratio in $format      {$speed / $best:.2f}')"
    done
  done
done
