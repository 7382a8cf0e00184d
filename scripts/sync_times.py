#!/usr/bin/env python3
"""Time of each phase of a weight sync to one `rollflow serve`, by the way of the weights: a folder, HTTP, a store, or a broadcast.

    scripts/sync_times.py [--program target/release/rollflow] [--steps 20] [--model KEYS]

Prints a table of mean seconds a version. The ways take turns for three rounds, so that other load on the machine reaches all of them.
The server stands still from `pause` to `resume`.
"""
import argparse, collections, os, pathlib, re, subprocess, tempfile, time, urllib.request

here = pathlib.Path(__file__).resolve().parent.parent
parser = argparse.ArgumentParser()
parser.add_argument("--program", default=str(here / os.environ.get("CARGO_TARGET_DIR", "target") / "release/rollflow"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--model", default='kind="tiny",hidden=512,layers=8,heads=8,kv_heads=4,intermediate=1536')
parser.add_argument("--rounds", type=int, default=3)
args = parser.parse_args()
work = pathlib.Path(tempfile.mkdtemp(prefix="sync"))
running = []
recipe = "pipelines/recipes/grpo.toml"
CARRY = {"http": "stream", "broadcast": "broadcast"}
PHASES = ["fetch", "send", "prepare", "pause", "load", "label", "check", "resume", "probe"]


def start(log, *words):
    out = open(work / log, "ab")
    process = subprocess.Popen([args.program, *map(str, words)], stdout=out, stderr=out, cwd=here)
    running.append(process)
    return process


def sets(*keys):
    return [word for key in keys for word in ("--set", key)]


def page(port):
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2).read().decode()
    except OSError:
        return None


def measure(way, times, versions):
    """One run; adds the sum of each phase's seconds, and the number of versions."""
    engine = f'kind="rollflow",urls=["{url}"],carry="{CARRY.get(way, "folder")}",dtype="bf16"'
    store = [f'store={{url="file://{work}/store-{way}-{versions[way]}"}}'] if way == "store" else []
    puller = None
    if way == "store":
        (work / f"store-{way}-{versions[way]}").mkdir()
        puller = start("pull.log", "weights", "pull", f"file://{work}/store-{way}-{versions[way]}", work / f"pulled-{versions[way]}", "--follow",
                       "--host", "127.0.0.1", "--every", 1)
    run = start("run.log", "run", recipe, "--out", work / f"run-{way}-{versions[way]}", "--metrics", "127.0.0.1:30871",
                *small, *sets(f'model={{kind="folder",path="{base}"}}', f"engine={{{engine}}}", "sft.steps=1", f"train.steps={args.steps}", "train.lr=1e-6", *store))
    last = ""
    while run.poll() is None:
        last = page(30871) or last
        time.sleep(0.1)
    if puller:
        puller.terminate()
    if run.returncode:
        raise SystemExit((work / "run.log").read_text()[-3000:])
    for name, labels, value in re.findall(r"rollflow_engine_sync_seconds_(sum|count)\{([^}]*)\} (\S+)", last):
        phase = re.search(r'phase="(\w+)"', labels)[1]
        if name == "sum":
            times[way][phase] += float(value)
        elif phase == "probe":
            versions[way] += int(float(value))


small = sets("batch.groups=4", "generate.group_size=4", "generate.max_new_tokens=8", "generate.max_num_seqs=16", "filter=[]",
             'reward={kind="regex",pattern="[0-9]"}', "train.target_reward=2")
try:
    if start("base.log", "run", recipe, "--out", work / "base", *small, *sets(f"model={{{args.model}}}", "train.steps=2", "checkpoint.every=2", "sft.steps=5")).wait():
        raise SystemExit((work / "base.log").read_text())
    base = work / "base/checkpoints/step_000002"
    start("serve.log", "serve", base, "--listen", "127.0.0.1:0", "--slots", 16)
    url = None
    while not url:
        time.sleep(0.2)
        url = next(iter(re.findall(r"http://127.0.0.1:\d+", (work / "serve.log").read_text())), None)
    times, versions = collections.defaultdict(collections.Counter), collections.Counter()
    for _ in range(args.rounds):
        for way in ["folder", "http", "store", "broadcast"]:
            measure(way, times, versions)
    bytes_ = sum(path.stat().st_size for path in base.glob("model*.safetensors"))
    print(f"{bytes_ / 1e6:.1f} MB in f32, {bytes_ / 2e6:.1f} MB in bf16")
    print("way      versions " + " ".join(f"{phase:>8}" for phase in PHASES) + "   pause to resume")
    for way in times:
        mean = {phase: times[way][phase] / versions[way] for phase in PHASES}
        still = sum(mean[phase] for phase in ["pause", "load", "label", "check", "resume"])
        print(f"{way:8} {versions[way]:8} " + " ".join(f"{mean[phase]:8.4f}" for phase in PHASES) + f"   {still:.4f}")
finally:
    for process in running:
        if process.poll() is None:
            process.terminate()
