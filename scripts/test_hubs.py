#!/usr/bin/env python3
"""Trains with two environments of verifiers and two of OpenEnv (examples/hubs), and checks their rewards: scripts/test_hubs.py PYTHON

PYTHON has verifiers 0.4.0 and openenv-core 0.3.0 (scripts/test_hubs.sh). Each run is a tiny model's, for some steps."""
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

here = pathlib.Path(__file__).resolve().parent.parent
python, hubs = sys.argv[1], here / "examples/hubs"
rollflow = os.environ.get("ROLLFLOW") or str(here / os.environ.get("CARGO_TARGET_DIR", "target") / "release/rollflow")
work = pathlib.Path(tempfile.mkdtemp(prefix="hubs"))
MODEL = 'model={kind="tiny",hidden=64,layers=2,heads=4,kv_heads=2,intermediate=192,vocab=64}'
SIZES = ["batch.groups=4", "generate.group_size=4", "generate.max_num_seqs=16", "filter=[]", "observe.rollouts_every=1", "flow.max_staleness=1"]


def conversations(path, pairs, before=()):
    """A file with what the model imitates before, each pair after the messages `before` of the user."""
    asked = lambda text: [{"role": "user", "content": one} for one in (*before, text)]
    lines = ({"messages": [*asked(text), {"role": "assistant", "content": said}]} for text, said in pairs)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f'sft={{data="{path}",steps=150,batch=64,lr=3e-3,schedule={{kind="constant"}}}}'


def run(name, *sets, command="run"):
    out = work / name
    words = [rollflow, command, "pipelines/recipes/grpo.toml"] + (["--out", str(out)] if command == "run" else [])
    words += [word for one in [MODEL, *SIZES, 'reward={kind="environment"}', *sets] for word in ("--set", one)]
    began = time.time()
    ended = subprocess.run(words, cwd=here, env={**os.environ, "PYTHONPATH": str(hubs)}, capture_output=True, text=True)
    assert ended.returncode == 0, f"{name}: {ended.stdout[-2000:]}{ended.stderr[-4000:]}"
    if command != "run":
        return ended.stdout
    rows = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    steps = [json.loads(line)["reward_mean"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    print(f"{name}: {len(steps)} steps, {len(rows)} samples, {time.time() - began:.0f} s, mean reward {steps[0]:.2f} → {sum(steps[-5:]) / 5:.2f}")
    return rows, steps


def kind(of, **keys):
    keys = {"kind": of, "python": python, **keys}
    return "environment={" + ",".join(f"{key}={json.dumps(value)}" for key, value in keys.items()) + "}"


def server(script):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(hubs / script), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/schema")
            return process, f"http://127.0.0.1:{port}"
        except OSError:
            assert process.poll() is None, f"{script} ended"
            time.sleep(0.2)
    raise AssertionError(f"{script} does not answer")


def of_verifiers():
    # Each sum is imitated right and wrong, so that there is something to learn.
    pairs = [(f"0+{b}=", str(b + error)) for b in range(10) for error in (0, 1)]
    imitate = conversations(work / "sums.jsonl", pairs)
    task = 'task={kind="environment",limit=10}'
    checked = run("check", imitate, task, kind("verifiers", name="addition_vf"), command="check")
    assert "environment.name: verifiers: addition_vf loaded" in checked, checked
    rows, steps = run("addition", imitate, task, kind("verifiers", name="addition_vf"), "train.steps=25", "train.lr=5e-4", "batch.groups=8", "generate.group_size=6", "generate.max_new_tokens=6")
    for row in rows:
        # What the environment read: marks of the model that a decoded response leaves out count here.
        said = row["metadata"]["conversation"][-1]["content"]
        right = said.strip() == row["metadata"]["task"]["answer"]
        assert row["reward"] == float(right) == row["metadata"]["verifiers"]["rewards"]["right"], row
    assert sum(steps[-5:]) > sum(steps[:5]), f"it learns: {steps}"

    guesses = conversations(work / "guesses.jsonl", [("Guess a number from 1 to 9.", str(n)) for n in range(1, 10)])
    rows, _ = run("guessing", guesses, 'task={kind="environment",limit=20}', kind("verifiers", name="guess_vf"), "train.steps=6", "generate.max_new_tokens=4")
    turns = {row["metadata"]["turns"] for row in rows}
    assert len(turns) > 1, f"games have one to three turns: {turns}"
    for row in rows:
        said = [turn["content"] for turn in row["metadata"]["conversation"] if turn["role"] == "assistant"]
        found = any(str(row["metadata"]["task"]["number"]) in text for text in said)
        assert row["reward"] == float(found), row


def of_openenv():
    prompts = work / "play.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "Play."}]}) + "\n")
    task = f'task={{kind="data",data="{prompts}"}}'
    guesses = conversations(work / "plays.jsonl", [("Guess a number from 1 to 9.", str(n)) for n in range(1, 10)], ["Play."])
    process, url = server("guess_openenv.py")
    try:
        rows, _ = run("openenv game", guesses, task, kind("openenv", url=url, max_turns=4), "train.steps=4", "generate.max_new_tokens=4")
    finally:
        process.terminate()
        process.wait()
    for row in rows:
        conversation = row["metadata"]["conversation"]
        assert conversation[1]["content"] == "Guess a number from 1 to 9.", conversation
        assert row["reward"] in (0.0, 1.0), row
    assert any(row["reward"] for row in rows), "some games are won"
    process, url = server("tools_openenv.py")
    imitate = conversations(work / "calls.jsonl", [("Play.", "<double>4</double>")])
    try:
        rows, _ = run("openenv tools", imitate, task, kind("openenv", url=url, max_turns=3, parser="xml"), "train.steps=3", "generate.max_new_tokens=30")
    finally:
        process.terminate()
        process.wait()
    results = [turn["content"] for row in rows for turn in row["metadata"]["conversation"] if turn["role"] == "tool"]
    assert "8" in results, f"a tool was called: {results[:5]}"


of_verifiers()
of_openenv()
print("all passed")
