"""Reads a run's TensorBoard files with TensorBoard's own reader and holds them against its metrics.jsonl.

    python3 scripts/read_tensorboard.py runs/mine      # with `pip install tensorboard`; scripts/tensorboard.sh does it all

Every finite number of every row must be there, at its step, as the nearest 32-bit float, and nothing else.
"""

import json
import math
import struct
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def single(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def main(run):
    reader = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    found = {(tag, event.step): event.value for tag in reader.Tags()["scalars"] for event in reader.Scalars(tag)}
    expected = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        expected.update({(name, row["step"]): single(float(value)) for name, value in row.items() if name != "step"})
    same = lambda a, b: a == b or math.isnan(a) and math.isnan(b)
    missing = sorted(key for key in expected if key not in found)
    other = sorted(key for key in found if key not in expected)
    wrong = sorted(key for key in expected if key in found and not same(found[key], expected[key]))
    for what, keys in (("missing", missing), ("unexpected", other), ("different", wrong)):
        for name, step in keys[:10]:
            print(f"{what}: {name} at step {step}: {found.get((name, step))}, metrics.jsonl has {expected.get((name, step))}")
    if missing or other or wrong or not expected:
        sys.exit(f"{run}: {len(missing)} missing, {len(other)} unexpected, {len(wrong)} different of {len(expected)} numbers")
    print(f"{run}: TensorBoard reads all {len(expected)} numbers of {len({step for _, step in expected})} steps")


main(Path(sys.argv[1]))
