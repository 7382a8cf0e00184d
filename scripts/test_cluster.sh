#!/usr/bin/env bash
# Runs what `rollflow deploy` writes on real parts, and mpirun:  scripts/test_cluster.sh [ssh] [slurm] [mpi] [schemas]
#
#   ssh      two sshds on loopback, each a host with a home of its own: start, survive, log, stop, resume, fetch
#   slurm    a Slurm of two nodes on loopback: the batch script is interrupted, goes back into the queue, resumes and ends
#   mpi      Open MPI's mpirun: two ranks train as one process does, and one that is killed ends both with its name
#   schemas  Kubernetes' and SkyPilot's own schemas, and the compose specification's
#
# Installs openssh-server, slurm-wlm, munge and openmpi-bin from Debian if they are missing, and Python packages into a folder of its own. Needs root.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/processes.sh
. scripts/venv.sh
chmod 755 "$work"
lacking() { command -v "$1" > /dev/null || [ -x "/usr/sbin/$1" ] || { apt-get update -qq; apt-get install -y -qq "${@:2}" > /dev/null; }; }

recipe=pipelines/recipes/grpo.toml
# With this rate no run is done before its last step.
tiny=(--set model.hidden=16 --set model.layers=1 --set model.heads=2 --set model.kv_heads=1 --set model.intermediate=32 --set sft.steps=2
  --set sft.batch=4 --set batch.groups=4 --set generate.group_size=4 --set generate.max_num_seqs=8 --set 'reward={kind="regex",pattern="[0-9]"}'
  --set 'filter=[]' --set flow.max_staleness=0 --set checkpoint.every=50 --set train.lr=1e-9 --set deploy.cpus=1 --set deploy.memory=1)
rows() { [ -f "$1/metrics.jsonl" ] && [ "$(wc -l < "$1/metrics.jsonl")" -ge "$2" ]; }
whole() { [ "$(grep -o '"step":[0-9]*' "$1/metrics.jsonl" | cut -d: -f2 | sort -n | uniq -d | wc -l)" = 0 ] || die "$1: a step was taken twice"; }

test_ssh() {
  lacking sshd openssh-server openssh-client
  mkdir -p /run/sshd "$work/ssh"
  ssh-keygen -q -t ed25519 -N '' -f "$work/ssh/key"
  ssh-keygen -q -t ed25519 -N '' -f "$work/ssh/host"
  cp "$work/ssh/key.pub" "$work/ssh/keys"
  : > "$work/ssh/config"
  for host in one two; do
    local port; port=$(port); mkdir -p "$work/home-$host"
    cat > "$work/ssh/$host" <<C
Port $port
ListenAddress 127.0.0.1
HostKey $work/ssh/host
AuthorizedKeysFile $work/ssh/keys
PidFile none
UsePAM no
PasswordAuthentication no
StrictModes no
SetEnv HOME=$work/home-$host
C
    # Neither host has the libtorch of this machine.
    unshare -m bash -c "mount -t tmpfs none $(dirname "$(dirname "$(readlink -f .libtorch/lib/libtorch_cpu.so 2> /dev/null || readlink -f "${LIBTORCH:-/nowhere}/lib/libtorch_cpu.so")")")
      exec /usr/sbin/sshd -D -e -f $work/ssh/$host" 2> "$work/ssh/$host.log" &
    ended+=($!)
    cat >> "$work/ssh/config" <<C
Host $host
  HostName 127.0.0.1
  Port $port
  User root
  IdentityFile $work/ssh/key
  IdentitiesOnly yes
  UserKnownHostsFile $work/ssh/known
  StrictHostKeyChecking accept-new
C
  done
  local options="deploy.ssh.options=[\"-F\",\"$work/ssh/config\"]"
  within 30 ssh -F "$work/ssh/config" one true
  within 30 ssh -F "$work/ssh/config" two true
  deploy() { "$rollflow" deploy "$@" --set "$options"; }
  local run=$work/home-one/.rollflow/runs/grpo-addition/run
  deploy ssh one "$recipe" "${tiny[@]}" --set train.steps=1000000
  deploy ssh two "$recipe" "${tiny[@]}" --set train.steps=60 --set deploy.name=other
  within 120 rows "$run" 5
  deploy status one:grpo-addition | grep -q running || die "status does not say that it runs"
  deploy ssh one "$recipe" "${tiny[@]}" && die "a run was started twice"
  deploy attach one:grpo-addition > "$work/attached" 2>&1 &
  local attached=$!
  ended+=("$attached")
  within 60 grep -q 'metrics: http' "$work/attached"
  local url; url=$(grep -o 'http://127.0.0.1:[0-9]*/metrics' "$work/attached" | head -n 1)
  within 30 curl -sf -o "$work/metrics" "$url"
  grep -q rollflow_ "$work/metrics" || die "no metrics come through the forwarded port"
  deploy stop one:grpo-addition
  wait "$attached" && die "attach does not end with the run's exit code"
  deploy status one:grpo-addition | grep -q 'ended with code 75' || die "a drained run does not end with 75"
  # Started again it resumes; nothing is copied twice.
  local taken; taken=$(wc -l < "$run/metrics.jsonl")
  deploy ssh one "$recipe" "${tiny[@]}" --set train.steps=$((taken + 20)) 2>&1 | tee "$work/again"
  ! grep -q copying "$work/again" || die "program or libraries were copied again"
  deploy logs -f one:grpo-addition > "$work/log"
  grep -q "going on after step" "$work/log" || die "the run did not resume"
  [ "$(wc -l < "$run/metrics.jsonl")" = $((taken + 20)) ] || die "steps were lost or taken twice"
  whole "$run"
  deploy fetch one:grpo-addition --out "$work/fetched"
  [ -f "$work/fetched/report.html" ] && [ -f "$work/fetched/metrics.jsonl" ] || die "what was fetched is no run"
  deploy logs -f two:other > /dev/null
  deploy status two:other | grep -q 'ended with code 0' || die "the run on the second host failed"
  echo "ssh: passed"
}

start_slurm() {
  lacking slurmctld slurm-wlm munge
  local home=$work/slurm host; host=$(hostname -s)
  mkdir -p "$home"/{state,run,log}
  head -c 1024 /dev/urandom > "$home/munge.key"; chmod 400 "$home/munge.key"
  local first second third; first=$(port); second=$(port); third=$(port)
  # Requeued jobs wait until their credentials have expired.
  cat > "$home/slurm.conf" <<C
ClusterName=here
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$home/run/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool-%n
SlurmctldPidFile=$home/run/slurmctld.pid
SlurmdPidFile=$home/run/slurmd-%n.pid
SlurmctldPort=$first
SlurmctldLogFile=$home/log/slurmctld.log
SlurmdLogFile=$home/log/slurmd-%n.log
JobRequeue=1
ReturnToService=2
SchedulerParameters=sched_interval=2
NodeName=$host NodeAddr=127.0.0.1 Port=$second CPUs=$(nproc) RealMemory=4000 Weight=1 State=UNKNOWN
NodeName=second NodeHostname=$host NodeAddr=127.0.0.1 Port=$third CPUs=$(nproc) RealMemory=4000 Weight=9 State=UNKNOWN
PartitionName=main Nodes=$host,second Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
C
  export SLURM_CONF=$home/slurm.conf
  munged --force --foreground --key-file="$home/munge.key" --socket="$home/run/munge.socket" --pid-file="$home/run/munged.pid" \
    --log-file="$home/log/munged.log" --seed-file="$home/run/munged.seed" 2> /dev/null &
  ended+=($!)
  within 30 test -S "$home/run/munge.socket"
  slurmctld -D > /dev/null 2>&1 &
  ended+=($!)
  local node
  for node in "$host" second; do
    slurmd -D -N "$node" > /dev/null 2>&1 &
    ended+=($!)
  done
  ready() { [ "$(sinfo -h -N -o %T 2> /dev/null | grep -cE 'idle|mixed')" = 2 ]; }
  within 60 ready
}

test_slurm() {
  start_slurm
  local folder=$work/project
  mkdir -p "$folder"
  cp "$recipe" "$folder/recipe.toml"
  cd "$folder"
  local args=(recipe.toml "${tiny[@]}" --set deploy.grace=30 --set deploy.slurm.partition=main --set deploy.ranks=2
    --set train.threads=1)
  "$rollflow" deploy slurm "${args[@]}" --set train.steps=1000000 --start
  local job; job=$(squeue -h -o %A)
  local run=$folder/runs/grpo-addition
  within 120 rows "$run" 5
  # What Slurm does before a time limit: it signals the script.
  scancel --batch --signal=TERM "$job"
  restarted() { scontrol show job "$job" | grep -q 'Restarts=1'; }
  within 120 restarted
  local taken; taken=$(wc -l < "$run/metrics.jsonl")
  within 180 rows "$run" $((taken + 5))
  grep -q "going on after step" "$folder"/grpo-addition-*.log || die "the requeued job did not resume"
  # And before a preemption, unless it is set to send_user_signal: it signals all steps.
  scancel --signal=TERM "$job"
  twice() { scontrol show job "$job" | grep -q 'Restarts=2'; }
  within 120 twice
  # A run that drains when it is cancelled goes back into the queue, where it is cancelled again.
  gone() { scancel "$1" 2> /dev/null || true; [ -z "$(squeue -h -j "$1" 2> /dev/null)" ]; }
  within 120 gone "$job"
  whole "$run"
  # Engines get no signal before the trainer has ended.
  printf '#!/bin/sh\ntrap "echo drains >> served; sleep 3; echo drained >> served; exit 75" TERM\necho trains >> served\n' > train
  printf '#!/bin/sh\ntrap "echo ends >> served; exit 0" TERM\necho serves >> served\n' > engine
  echo 'while :; do sleep 0.2; done' | tee -a train >> engine
  chmod +x train engine
  "$rollflow" deploy slurm recipe.toml "${tiny[@]}" --set deploy.grace=30 --set deploy.slurm.partition=main --set deploy.name=served \
    --set engine.kind=vllm --set deploy.engines.count=1 --set deploy.engines.cpus=1 --set deploy.engines.memory=1 \
    --set 'deploy.engines.command=["./engine"]' --set 'deploy.program="./train"' --start
  job=$(squeue -h -n served -o %A)
  began() { grep -qs trains served && grep -q serves served; }
  within 60 began
  scancel --batch --signal=TERM "$job"
  within 60 grep -q ends served
  [ "$(grep -E 'drain|ends' served | head -n 3 | tr '\n' ' ')" = "drains drained ends " ] || die "the engine ended with the trainer: $(cat served)"
  within 120 gone "$job"
  cd - > /dev/null
  echo "slurm: passed"
}

test_mpi() {
  lacking mpirun openmpi-bin
  local run=(run pipelines/recipes/sft.toml --set model.hidden=16 --set model.layers=1 --set model.heads=2 --set model.kv_heads=1
    --set model.intermediate=32 --set sft.batch=16 --set sft.micro_batch_tokens=64 --set sft.threads=1)
  local mpirun=(mpirun --allow-run-as-root --oversubscribe -np 2)
  "$rollflow" "${run[@]}" --set sft.steps=12 --out "$work/alone" > /dev/null 2>&1
  "${mpirun[@]}" "$rollflow" "${run[@]}" --set sft.steps=12 --set 'ranks.shard="optimizer"' --out "$work/mpi" > /dev/null 2> "$work/mpi.log" \
    || die "mpirun: $(tail -n 5 "$work/mpi.log")"
  python3 - "$work/alone/metrics.jsonl" "$work/mpi/metrics.jsonl" <<'PY' || die "mpirun: the losses are not those of one process"
import json, sys
alone, mpi = ([json.loads(line)["loss"] for line in open(name)] for name in sys.argv[1:])
sys.exit(not (len(alone) == len(mpi) == 12 and all(abs(a - b) < 1e-4 for a, b in zip(alone, mpi))))
PY
  "${mpirun[@]}" "$rollflow" "${run[@]}" --set sft.steps=1000000 --out "$work/mpi-killed" > "$work/killed.log" 2>&1 &
  local launcher=$!
  within 60 rows "$work/mpi-killed" 3
  # Children of mpirun, rank 0 first.
  kill -KILL "$(pgrep -P "$launcher" | tail -n 1)"
  wait "$launcher" && die "mpirun: a run whose rank was killed succeeded"
  grep -q "signal 9\|is gone" "$work/killed.log" || die "mpirun: the killed rank is not named: $(tail -n 5 "$work/killed.log")"
  echo "mpi: passed"
}

test_schemas() {
  venv deploy-schemas pip kubernetes-validate jsonschema pyyaml compose-spec skypilot
  local engines=(--set engine.kind=vllm --set deploy.engines.count=2 --set 'deploy.engines.command=["vllm","serve","m"]'
    --set deploy.gpus=1 --set deploy.engines.gpus=1 --set deploy.skypilot.accelerators=H200:2 --set deploy.skypilot.engine_accelerators=H200:1
    --set deploy.hours=2.5 --set deploy.skypilot.volume=runs --set 'deploy.secrets=["HF_HOME_KEY"]' --set 'deploy.env=["A=b: $c # d"]')
  for shape in plain ranks engines; do
    local more=()
    [ $shape = plain ] || more+=(--set deploy.ranks=4 --set deploy.hosts=2)
    [ $shape != engines ] || more+=("${engines[@]}")
    for platform in kubernetes skypilot compose; do
      "$rollflow" deploy $platform "$recipe" "${more[@]}" --out "$work/$shape.$platform.yaml" > /dev/null
    done
    "$rollflow" deploy slurm "$recipe" "${more[@]}" --dry-run 2> /dev/null | bash -n
  done
  "$venv/bin/python" scripts/check_deploy.py "$work"
  echo "schemas: passed"
}

for part in "${@:-ssh slurm mpi schemas}"; do
  for name in $part; do "test_$name"; done
done
