#!/usr/bin/env python3
"""Trains with `rollflow serve`s that are killed, stopped, cut off, added and taken away, and checks that nothing is lost.

    scripts/test_fleet.py [--minutes 15] [--every 20] [--seed 0] [--calm 60]

It runs in a network namespace of its own (root, `ip` and `iptables` of Debian). First and last, for `--calm` seconds, nothing happens; the
tokens per second of the time between are compared with those.
"""
import argparse, collections, json, os, pathlib, random, re, shutil, signal, subprocess, sys, tempfile, time, urllib.request

here = pathlib.Path(__file__).resolve().parent.parent
parser = argparse.ArgumentParser()
for name, default in [("minutes", 15.0), ("every", 20.0), ("seed", 0), ("calm", 60.0)]:
    parser.add_argument(f"--{name}", type=type(default), default=default)
args = parser.parse_args()
if os.environ.get("INSIDE") != "1":
    if not shutil.which("iptables"):
        sys.exit("test_fleet: needs iptables (apt-get install iptables)")
    os.environ["INSIDE"] = "1"
    os.execvp("unshare", ["unshare", "-n", sys.executable, *sys.argv])
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
rollflow = os.environ.get("PREBUILT") or str(here / os.environ.get("CARGO_TARGET_DIR", "target") / "release/rollflow")
work = pathlib.Path(tempfile.mkdtemp(prefix="fleet"))
draw = random.Random(args.seed)
ports = iter(range(31000, 32000))
metrics_port = 30999


def start(log, *words):
    out = open(work / log, "ab")
    # A session of its own, and an end with this script.
    end_with_us = lambda: __import__("ctypes").CDLL(None).prctl(1, signal.SIGKILL)
    return subprocess.Popen([rollflow, *map(str, words)], stdout=out, stderr=out, cwd=here, preexec_fn=end_with_us)


class Member:
    def __init__(self):
        self.port = next(ports)
        self.listed, self.ill = True, None
        self.begin()

    def begin(self):
        self.process = start(f"serve-{self.port}.log", "serve", base, "--listen", f"127.0.0.1:{self.port}", "--slots", 8)

    def rule(self, action):
        for end in ("--dport", "--sport"):
            subprocess.run(["iptables", action, "INPUT", "-p", "tcp", end, str(self.port), "-j", "DROP"], check=True)

    def heal(self):
        if self.ill == "killed":
            self.begin()
        elif self.ill == "stopped":
            self.process.send_signal(signal.SIGCONT)
        elif self.ill == "cut off":
            self.rule("-D")
        self.ill = None

    def fall(self, how):
        self.ill = how
        if how == "killed":
            self.process.kill()
            self.process.wait()
        elif how == "stopped":
            self.process.send_signal(signal.SIGSTOP)
        else:
            self.rule("-I")


def write_list():
    text = "".join(f"http://127.0.0.1:{member.port}\n" for member in members if member.listed)
    (work / "writing").write_text(text)
    (work / "writing").rename(work / "members.txt")


def scrape():
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as page:
        found = collections.defaultdict(dict)
        for line in page.read().decode().splitlines():
            if match := re.match(r"(\w+)(?:\{(.*)\})? (\S+)$", line):
                found[match[1]][match[2] or ""] = float(match[3])
        return found


def tokens():
    return sum(scrape()["rollflow_generated_tokens_total"].values())


def rate(seconds, what):
    """Tokens per second while this time passes, and `what` is done in it."""
    begun, before = time.time(), tokens()
    while time.time() < begun + seconds:
        what(time.time() - begun)
        time.sleep(0.5)
        if run.poll() is not None:
            sys.exit(f"test_fleet: the run ended with code {run.returncode}:\n" + (work / "run.log").read_text()[-3000:])
    return (tokens() - before) / (time.time() - begun)


recipe = ["pipelines/recipes/grpo.toml"]
sets = lambda *keys: [word for key in keys for word in ("--set", key)]
small = sets("batch.groups=8", "generate.group_size=4", "generate.max_new_tokens=24", "generate.max_num_seqs=96", "filter=[]",
             'reward={kind="regex",pattern="[0-9]"}')
if start("base.log", "run", *recipe, "--out", work / "base", *small, *sets("train.steps=2", "checkpoint.every=2", "sft.steps=5")).wait():
    sys.exit((work / "base.log").read_text())
base = work / "base/checkpoints/step_000002"
members = [Member() for _ in range(3)]
write_list()
engine = f'engine={{kind="rollflow",members="{work}/members.txt",carry="stream",hedge_after=3,drain_timeout=5,pause_timeout=5,load_timeout=20}}'
run = start("run.log", "run", *recipe, "--out", work / "run", *small, "--metrics", f"127.0.0.1:{metrics_port}",
            *sets(f'model={{kind="folder",path="{base}"}}', engine, "train.steps=1000000", "sft.steps=1", "train.lr=1e-9", "train.target_reward=2", "flow.max_staleness=3",
                  "observe.rollouts_every=1", "checkpoint.every=50"))
for _ in range(200):
    time.sleep(0.5)
    try:
        if tokens() > 0:
            break
    except OSError:
        pass
else:
    sys.exit("test_fleet: no token:\n" + (work / "run.log").read_text()[-3000:])

done, healing, next_event, looks, well_looks = collections.Counter(), [], 0.0, 0, 0


def events(now):
    global next_event, looks, well_looks
    looks += 1
    well_looks += sum(member.listed and not member.ill for member in members)
    for member, until in list(healing):
        if now > until:
            member.heal()
            healing.remove((member, until))
    if now < next_event:
        return
    next_event += args.every
    well = [member for member in members if member.listed and not member.ill]
    choices = ["killed", "stopped", "cut off"] if len(well) > 1 else []
    choices += ["added"] if len(well) < 4 else []
    choices += ["taken away"] if len(well) > 2 else []
    what = draw.choice(choices)
    done[what] += 1
    if what == "added":
        members.append(Member())
    elif what == "taken away":
        member = draw.choice(well)
        member.listed = False
        # As a cluster does it: off the list, then asked to end.
        healing.append((type("Ends", (), {"heal": lambda self, member=member: member.process.terminate()})(), now + 8))
    else:
        member = draw.choice(well)
        member.fall(what)
        healing.append((member, now + draw.uniform(0.3, 1.5) * args.every))
    write_list()


before = rate(args.calm, lambda now: None)
during = rate(args.minutes * 60, events)
for member, _ in healing:
    member.heal()
# Three again.
listed = [member for member in members if member.listed]
for member in listed[3:]:
    member.listed = False
members += [Member() for _ in range(3 - len(listed))]
write_list()
rate(20, lambda now: None)
after = rate(args.calm, lambda now: None)
last = scrape()
run.send_signal(signal.SIGTERM)
code = run.wait(120)
rows = [json.loads(line) for line in open(work / "run/metrics.jsonl")]
steps = [row["step"] for row in rows]
trained = collections.Counter()
oldest = 0
for line in open(work / "run/rollouts.jsonl"):
    row = json.loads(line)
    trained[row["group"], row["index"]] += 1
groups = {group for group, _ in trained}
gap = max(row["log_prob_gap_mean_nats"] for row in rows)
problems = [text for text, wrong in [
    (f"the run ended with code {code}", code not in (0, 75)),
    (f"the ledger does not balance: {last['rollflow_ledger_imbalance']}", any(last["rollflow_ledger_imbalance"].values())),
    ("a sample was trained twice", max(trained.values()) > 1),
    ("a sample was left out", len(trained) != 4 * len(groups) or sorted(groups) != list(range(len(groups)))),
    (f"log-probabilities differ by {gap}: tokens of other weights", gap > 1e-3),
    ("a step is missing", steps != list(range(1, len(steps) + 1))),
] if wrong]
calm = (before + after) / 2
print(json.dumps({
    "events": dict(done), "steps": len(steps), "samples": len(trained),
    "tokens_per_second": {"before": round(before), "during": round(during), "after": round(after)}, "ratio": round(during / calm, 3),
    "duplicates": sum(last["rollflow_engine_duplicates_total"].values()), "members_well": round(well_looks / looks, 2), "moved": sum(last["rollflow_engine_moved_total"].values()),
    "staleness_max": max(row["sample_staleness_max_versions"] for row in rows), "gap_max": gap, "folder": str(work),
}, indent=1))
sys.exit("; ".join(problems) or None)
