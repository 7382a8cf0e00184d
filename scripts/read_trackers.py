"""Runs the importers of docs/how_to/monitoring.md on a run, offline, and holds what the trackers' own readers find against its metrics.jsonl.

    python3 scripts/read_trackers.py runs/mine      # with `pip install wandb trackio`; scripts/trackers.sh does it all
"""

import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path


def importer(tracker):
    """The program that docs/how_to/monitoring.md shows."""
    page = (Path(__file__).parent.parent / "docs/how_to/monitoring.md").read_text()
    programs = re.findall(r'^python3 -c "(.*)" runs/mine$', page, re.MULTILINE)
    found = [program for program in programs if f"import json,sys,{tracker};" in program]
    assert len(found) == 1, f"{len(found)} importers for {tracker} in docs/how_to/monitoring.md"
    return found[0]


def records(path):
    """What a file of wandb holds: after a head of 7 bytes, records as LevelDB's logs have them, in blocks of 32 KiB."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        # All of it, or its last part.
        if part in (1, 4):
            yield whole
            whole = b""


def of_wandb(folder):
    """Rows of an offline run, by step."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = {}
    for data in records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = values.get("_step", record.history.step.num)
            rows[int(step)] = {name: value for name, value in values.items() if not name.startswith("_")}
    return rows


def of_trackio(folder):
    """The same of trackio's database."""
    import sqlite3

    (file,) = [path for path in folder.glob("trackio/*.db")]
    rows = sqlite3.connect(file).execute("select step, metrics from metrics order by step").fetchall()
    return {int(step): json.loads(metrics) for step, metrics in rows}


def number(value):
    return float({"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(value, value))


def main(run):
    expected = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        expected[step] = {name: float(value) for name, value in row.items()}
    for tracker, read in (("wandb", of_wandb), ("trackio", of_trackio)):
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": f"{folder}/trackio"}
            command = [sys.executable, "-c", importer(tracker), str(run.resolve())]
            subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
            found = read(Path(folder))
        same = lambda a, b: a == b or math.isnan(a) and math.isnan(b)
        wrong = [
            f"{name} at step {step}: {found.get(step, {}).get(name)}, metrics.jsonl has {value}"
            for step, row in expected.items()
            for name, value in row.items()
            if not (name in found.get(step, {}) and same(number(found[step][name]), value))
        ]
        if wrong or not expected:
            print("\n".join(wrong[:10]))
            sys.exit(f"{tracker}: {len(wrong)} numbers are missing or different")
        print(f"{run}: {tracker} has all {sum(map(len, expected.values()))} numbers of {len(expected)} steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
