#!/usr/bin/env bash
# Runs a training whose weights and checkpoints pass through an S3-compatible server on loopback (moto, from PyPI, in a folder of its own):
# a puller brings every version, a second one comes late, damaged objects are refused, and the run goes on from the store on another machine.
#
#   FIGURES=1 scripts/test_stores.sh    bytes of each version and seconds of the updates as well
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/processes.sh
. scripts/venv.sh
venv moto-5.1 pip 'moto[server]==5.1.*' boto3

s3=$(port)
"$venv/bin/moto_server" -H 127.0.0.1 -p "$s3" > "$work/moto.log" 2>&1 &
ended+=($!)
export AWS_ACCESS_KEY_ID=a-key AWS_SECRET_ACCESS_KEY=never-to-be-written AWS_REGION=us-east-1 AWS_ENDPOINT=http://127.0.0.1:$s3 AWS_ALLOW_HTTP=true
export AWS_ENDPOINT_URL=$AWS_ENDPOINT
within 20 curl -sf -o "$work/page" "$AWS_ENDPOINT/moto-api/"
s3() { "$venv/bin/python" - "$@" << 'P'
import sys, boto3
client = boto3.client("s3")
what, *rest = sys.argv[1:]
keys = lambda under: [(of["Key"], of["Size"]) for page in client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=under) for of in page.get("Contents", [])]
if what == "create":
    client.create_bucket(Bucket="bucket")
elif what == "list":
    for key, size in keys(rest[0]):
        print(size, key)
elif what == "damage":
    # The middle byte of every object below a prefix.
    for key, size in keys(rest[0]):
        body = bytearray(client.get_object(Bucket="bucket", Key=key)["Body"].read())
        body[size // 2] ^= 1
        client.put_object(Bucket="bucket", Key=key, Body=bytes(body))
elif what == "remove":
    for key, _ in keys(rest[0]):
        client.delete_object(Bucket="bucket", Key=key)
P
}
s3 create

tiny=(--set "model={${MODEL:-kind=\"tiny\",hidden=32,layers=2,heads=2,kv_heads=1,intermediate=64}}" --set sft.steps=5 --set sft.batch=4 --set batch.groups=4
  --set generate.group_size=4 --set generate.max_num_seqs=8 --set 'reward={kind="regex",pattern="[0-9]"}' --set "filter=[]")
recipe=pipelines/recipes/grpo.toml
"$rollflow" run $recipe --out "$work/base" "${tiny[@]}" --set train.steps=2 --set checkpoint.every=2 > "$work/base.log" 2>&1 || { cat "$work/base.log"; die "no base"; }
base=$work/base/checkpoints/step_000002
"$rollflow" serve "$base" --listen 127.0.0.1:0 > "$work/serve.log" 2>&1 &
ended+=($!)
listens() { [ -f "$work/serve.log" ] && grep -o 'http://127.0.0.1:[0-9]*' "$work/serve.log" | head -1 | grep -q .; }
within 40 listens
url=$(grep -o 'http://127.0.0.1:[0-9]*' "$work/serve.log" | head -1)
"$rollflow" weights pull s3://bucket/run "$work/pulled" --follow --host 127.0.0.1 --every 1 > "$work/pull.log" 2>&1 &
ended+=($!)
onto=("${tiny[@]}" --set "model={kind=\"folder\",path=\"$base\"${DTYPE:+,dtype=\"$DTYPE\"}}" --set "engine={kind=\"rollflow\",urls=[\"$url\"]}" --set sft.steps=1 ${SETS:-})
"$rollflow" run $recipe --out "$work/run" "${onto[@]}" --set 'store={url="s3://bucket/run",keep=99}' --set train.steps=12 --set checkpoint.every=4 \
  --set train.lr=1e-6 > "$work/run.log" 2>&1 || { cat "$work/run.log" "$work/pull.log"; die "the run failed"; }
grep -q 'version 13 ' "$work/pull.log" || { cat "$work/pull.log"; die "the puller does not hold version 13"; }

# A host that missed every version.
"$rollflow" weights pull s3://bucket/run "$work/late" > "$work/late.log" 2>&1 || { cat "$work/late.log"; die "the late host got nothing"; }
diff -r "$work/pulled/latest/" "$work/late/latest/"

# The run on another machine.
"$rollflow" resume s3://bucket/run --out "$work/moved" --set train.steps=14 > "$work/moved.log" 2>&1 || { cat "$work/moved.log"; die "no resume"; }
[ "$(tail -1 "$work/moved/metrics.jsonl" | grep -o '"step":14')" = '"step":14' ] || die "the moved run did not reach step 14"

# Damage in a version's data is found, and what is loaded stays.
newest=$(s3 list run/weights/manifests/ | cut -d' ' -f2 | sort | tail -1 | grep -o 'w[0-9]*-v[0-9]*')
s3 damage "run/weights/data/$newest/"
if "$rollflow" weights pull s3://bucket/run "$work/damaged" > "$work/damaged.log" 2>&1; then die "damaged weights were accepted"; fi
[ ! -e "$work/damaged/latest" ] || die "damaged weights have a folder"
cat "$work/damaged.log"

if grep -rlF "$AWS_SECRET_ACCESS_KEY" "$work" --include='*' > "$work/leaks"; then cat "$work/leaks"; die "a credential was written"; fi
if [ -n "${FIGURES:-}" ]; then
  du -b "$work"/pulled/latest/*.safetensors
  s3 list run/weights/data/ | awk '{split($2, path, "/"); bytes[path[4]] += $1} END {for (version in bytes) print version, bytes[version]}' | sort
  cat "$work/pull.log"
fi
echo "test_stores: passed"
