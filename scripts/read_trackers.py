"""Logs a run to three trackers and TensorBoard, kills it, resumes it, and compares what their own readers find with metrics.jsonl:
read_trackers.py ROLLFLOW PYTHON FOLDER. PYTHON has the packages."""
import contextlib
import json
import math
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request

READER = """
import json, pathlib, sqlite3, struct, sys
folder, run, uri = sys.argv[1:]
folder = pathlib.Path(folder)


def records(path):
    # A file of wandb: after a head of 7 bytes, records as LevelDB's logs have them, in blocks of 32 KiB.
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if part in (1, 4):
            yield whole
            whole = b""


def wandb():
    from wandb.proto import wandb_internal_pb2
    rows = {}
    files = sorted(pathlib.Path(run).glob("wandb/offline-run-*/run-*.wandb"))
    ids = {file.stem for file in files}
    assert len(ids) == 1, f"a resumed run is the same run: {ids}"
    for file in files:
        for data in records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                rows.setdefault(int(values.get("_step", record.history.step.num)), {}).update(values)
    return rows


def trackio():
    rows = {}
    (file,) = [path for path in folder.glob("trackio/*.db")]
    for step, metrics in sqlite3.connect(file).execute("select step, metrics from metrics order by step"):
        rows.setdefault(int(step), {}).update(json.loads(metrics))
    return rows


def mlflow():
    import mlflow
    client, rows = mlflow.MlflowClient(uri), {}
    (found,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    if found.info.status != "FINISHED":
        return found.info.status
    assert len(found.data.params) > 100, f"each key of the recipe is a parameter: {len(found.data.params)}"
    for key in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, key):
            assert metric.step not in rows or key not in rows[metric.step], f"{key} of step {metric.step} twice"
            rows.setdefault(metric.step, {})[key] = metric.value
    for artifact in client.list_artifacts(found.info.run_id):
        if artifact.path == "samples.json":
            rows[0] = {"samples": 1}
    return rows


def tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    reader, rows = EventAccumulator(run, size_guidance={"scalars": 0}), {}
    reader.Reload()
    for tag in reader.Tags()["scalars"]:
        for event in reader.Scalars(tag):
            rows.setdefault(event.step, {})[tag] = event.value
    return rows


print(json.dumps({read.__name__: read() for read in (wandb, trackio, mlflow, tensorboard)}))
"""


def free():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main(rollflow, python, folder):
    folder, port = pathlib.Path(folder), free()
    run, uri = folder / "run", f"http://127.0.0.1:{port}"
    env = {**os.environ, "WANDB_SILENT": "true", "TRACKIO_DIR": str(folder / "trackio"), "MLFLOW_TRACKING_URI": uri}
    server = subprocess.Popen(
        [python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
         "--artifacts-destination", str(folder / "artifacts")], stdout=subprocess.DEVNULL, stderr=open(folder / "mlflow.log", "w"), start_new_session=True)
    # MLflow doesn't take such names.
    (folder / "rewards.py").write_text(
        "def reward(completion, answer):\n"
        "    return {'reward': float(completion == answer), 'len>3': float(len(completion) > 3), 'f1 (macro)': 0.5}\n")
    sets = ["train.steps=60", "sft.steps=2", "observe.progress=false", "observe.tensorboard=true", "observe.rollouts_every=5", "checkpoint.every=5", "flow.max_staleness=0",
            "train.target_reward=2", "eval={every=20,limit=10}", f"reward={{kind='python', file='{folder}/rewards.py', function='reward'}}",
            f"observe.wandb={{offline=true, python={python!r}}}",
            f"observe.trackio={{project='sums', python={python!r}}}", f"observe.mlflow={{project='sums', uri={uri!r}, python={python!r}}}"]

    def read():
        return json.loads(subprocess.run([python, "-c", READER, folder, run, uri], env=env, check=True, stdout=subprocess.PIPE).stdout)

    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{uri}/health", timeout=1)
                break
            time.sleep(0.2)
        command = [rollflow, "run", "pipelines/recipes/grpo.toml", "--out", run, *[word for line in sets for word in ("--set", line)]]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        states = [run / "trackers" / f"{kind}.json" for kind in ("wandb", "trackio", "mlflow")]
        deadline = time.time() + 240

        def logged():
            return all(state.exists() and json.loads(state.read_text())["step"] >= 8 for state in states)

        while not logged() and process.poll() is None:
            assert time.time() < deadline, "the trackers did not get on"
            time.sleep(0.1)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            # The trackers of a killed run end by themselves; the resumed run's continue.
            time.sleep(10)
            assert read()["mlflow"] == "FAILED", "a killed run has not finished"
            subprocess.run([rollflow, "resume", run], env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        else:
            print("the run ended before it was killed")
        found = read()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    expected = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        expected[step] = {name: float(value) for name, value in row.items()}
    assert len(expected) == 60, len(expected)
    assert "reward_part_len>3" in expected[1], expected[1]
    for tracker, rows in found.items():
        number = lambda value: float({"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(value, value))
        same = lambda a, b: math.isclose(a, b, rel_tol=1e-12) or math.isnan(a) and math.isnan(b)
        finite, single = tracker == "mlflow", tracker == "tensorboard"
        named = (lambda name: re.sub("[>()]", "_", name)) if tracker == "mlflow" else str
        stored = lambda value: struct.unpack("f", struct.pack("f", value))[0] if single else value
        wrong = [f"{name} at step {step}: {rows.get(str(step), {}).get(named(name))}, metrics.jsonl has {value}"
                 for step, row in expected.items() for name, value in row.items() if not (finite and not math.isfinite(value))
                 if not (named(name) in rows.get(str(step), {}) and same(number(rows[str(step)][named(name)]), stored(value)))]
        assert not wrong, f"{tracker}: {len(wrong)} numbers are missing or different:\n" + "\n".join(wrong[:10])
        if single:
            unexpected = [f"{name} at step {step}" for step, row in rows.items() for name in row if name not in expected.get(int(step), {})]
            assert not unexpected, f"{tracker}: {len(unexpected)} numbers are not in metrics.jsonl:\n" + "\n".join(unexpected[:10])
        else:
            assert any(key.startswith("samples") for row in rows.values() for key in row), f"{tracker} has no table of samples"
        print(f"{tracker}: all {sum(map(len, expected.values()))} numbers of {len(expected)} steps{'' if single else ', and samples'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
