#!/usr/bin/env python3
"""Trains with servers that are killed, stopped, cut off, added and taken away, and checks that nothing is lost.

    scripts/test_fleet.py [--minutes 15] [--every 20] [--seed 0] [--calm 30] [--share 0.1] [--also vllm=COMMAND] [--also sglang=COMMAND] [--also_share 0.4]

It runs in a network namespace of its own (root, `ip` and `iptables` of Debian). Each server gets a share of a processor (cgroups), so that
four of them and the trainer fit two processors, and the servers are what limits the run; 0 is no limit. Before the events and after them, it measures the tokens per
second of one to four servers that nothing happens to, with `--also` of every set of them. The tokens of the events are compared with what the
servers that were well at each moment make then, by these figures. Servers begin with other weights than the run, so that a token of weights that the run did not give them shows.

`--also` adds a server of another kind, which is stopped and cut off as others are, and never killed. COMMAND is as `scripts/engines.sh` prints it.
It gets `--also_share` of a processor.
"""
import argparse, atexit, collections, itertools, json, os, pathlib, random, re, shutil, signal, subprocess, sys, tempfile, time, urllib.request

here = pathlib.Path(__file__).resolve().parent.parent
parser = argparse.ArgumentParser()
for name, default in [("minutes", 15.0), ("every", 20.0), ("seed", 0), ("calm", 30.0), ("share", 0.1), ("also_share", 0.4)]:
    parser.add_argument(f"--{name}", type=type(default), default=default)
parser.add_argument("--also", action="append", default=[], metavar="KIND=COMMAND")
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


def start(log, *words, own=True):
    out = open(work / log, "ab")
    # An end with this script.
    end_with_us = lambda: __import__("ctypes").CDLL(None).prctl(1, signal.SIGKILL)
    words = [rollflow, *map(str, words)] if own else list(map(str, words))
    return subprocess.Popen(words, stdout=out, stderr=out, cwd=here, preexec_fn=end_with_us, start_new_session=True)


class Processors:
    """A group of processes, and those that they start, that can be limited to a share of a processor."""

    OLD = pathlib.Path("/sys/fs/cgroup/cpu")

    def __init__(self, name):
        self.folder = (self.OLD if self.OLD.is_dir() else self.OLD.parent) / name
        self.folder.mkdir()

    def limit(self, share):
        """Gives the processes this share of a processor; None is no limit."""
        period = 20_000
        quota = int(share * period) if share else None
        if self.OLD.is_dir():
            (self.folder / "cpu.cfs_period_us").write_text(str(period))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota or -1))
        else:
            (self.folder / "cpu.max").write_text(f"{quota or 'max'} {period}")

    def add(self, process):
        (self.folder / "cgroup.procs").write_text(str(process.pid))

    def remove(self):
        for _ in range(50):
            try:
                return self.folder.rmdir()
            except OSError:
                time.sleep(0.1)


class Member:
    """A server: on the list or not, and well, killed, stopped or cut off."""

    def __init__(self, kind="rollflow", command=None):
        self.port, self.kind, self.command = next(ports), kind, command
        self.listed, self.ill, self.ready = True, None, False
        self.share = args.share if kind == "rollflow" else args.also_share
        self.processors = Processors(f"{work.name}-{self.port}") if self.share else None
        atexit.register(self.end)
        self.begin()

    def begin(self):
        self.ready, log = False, f"serve-{self.port}.log"
        if self.kind == "rollflow":
            self.process = start(log, "serve", others, "--listen", f"127.0.0.1:{self.port}", "--slots", 8,
                                 *(["--context-length", 256] if args.also else []))
        elif self.kind == "vllm":
            own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": ""}
            self.process = start(log, "env", *(f"{name}={value}" for name, value in own.items()), self.command, others, "--port", self.port,
                                 "--host", "127.0.0.1", *flags["vllm"], own=False)
        else:
            self.process = start(log, self.command, "--model-path", others, "--port", self.port, "--host", "127.0.0.1", *flags["sglang"], own=False)
        if self.processors:
            # Its start is not limited.
            self.processors.limit(None)
            self.processors.add(self.process)

    def look(self):
        """True from the first answer after its begin on, while nothing is wrong with it."""
        if not self.ready and not self.ill:
            try:
                self.ready = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1).status == 200
                if self.processors:
                    self.processors.limit(self.share)
            except OSError:
                pass
        return self.ready and self.listed and not self.ill

    def rule(self, action):
        for end in ("--dport", "--sport"):
            subprocess.run(["iptables", action, "INPUT", "-p", "tcp", end, str(self.port), "-j", "DROP"], check=True)

    def heal(self):
        if self.ill == "killed":
            self.begin()
        elif self.ill == "stopped":
            os.killpg(self.process.pid, signal.SIGCONT)
        elif self.ill == "cut off":
            self.rule("-D")
        self.ill = None

    def fall(self, how):
        self.ill = how
        if how == "killed":
            self.process.kill()
            self.process.wait()
        elif how == "stopped":
            os.killpg(self.process.pid, signal.SIGSTOP)
        else:
            self.rule("-I")

    def leave(self):
        self.listed = False

    def end(self):
        # With the workers that real servers start.
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.processors:
            self.processors.remove()
            self.processors = None


def write_list():
    text = "".join(f"{member.kind}+http://127.0.0.1:{member.port}\n" for member in members if member.listed)
    (work / "writing").write_text(text)
    (work / "writing").rename(work / "members.txt")


def scrape():
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as page:
        found = collections.defaultdict(dict)
        for line in page.read().decode().splitlines():
            if match := re.match(r"(\w+)(?:\{(.*)\})? (\S+)$", line):
                found[match[1]][match[2] or ""] = float(match[3])
        return found


def value(page, name, *labels):
    """Sum of a metric's series with these labels."""
    return sum(number for found, number in page[f"rollflow_{name}"].items() if all(label in found for label in labels))


def tokens():
    return value(scrape(), "generated_tokens_total")


def check_run():
    if run.poll() is not None:
        sys.exit(f"test_fleet: the run ended with code {run.returncode}:\n" + (work / "run.log").read_text()[-3000:])


def rate(seconds, what=lambda now, passed: None):
    """Tokens per second while this time passes, and `what` is done in it."""
    begun, before = time.time(), tokens()
    last = begun
    while time.time() < begun + seconds:
        now = time.time()
        what(now - begun, now - last)
        last = now
        time.sleep(0.5)
        check_run()
    return (tokens() - before) / (time.time() - begun)


def until_serving(count):
    """Waits until so many servers get work."""
    for _ in range(600):
        if value(scrape(), "engines", 'state="serving"') == count and all(member.look() for member in members if member.listed):
            # Samples spread over them.
            return rate(3)
        time.sleep(0.5)
        check_run()
    sys.exit(f"test_fleet: never {count} servers that get work:\n" + (work / "run.log").read_text()[-3000:])


def kinds(some):
    """How many servers of each kind these are: `rollflow 2, vllm 1`."""
    return ", ".join(f"{kind} {count}" for kind, count in sorted(collections.Counter(member.kind for member in some).items()))


def calm(several):
    """Tokens per second of each of several sets of servers: a number of rollflow's, and the other kinds."""
    found = {}
    for count, beyond in several:
        own = [member for member in members if member.listed and member.kind == "rollflow"]
        leaving = own[count:]
        for member in leaving:
            member.leave()
        members.extend(Member() for _ in range(count - len(own)))
        for member in members:
            if member.kind != "rollflow":
                member.listed = member.kind in beyond
        write_list()
        until_serving(count + len(beyond))
        for member in leaving:
            member.end()
        found[kinds(member for member in members if member.listed)] = rate(args.calm)
    return found


def untied(folder):
    """Gives a model whose head is its embedding a head of its own: vLLM reloads one without the other."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:begin]), data[begin:]
    embedding = header["model.embed_tokens.weight"]
    from_, to = embedding["data_offsets"]
    header["lm_head.weight"] = {**embedding, "data_offsets": [len(body), len(body) + to - from_]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body + body[from_:to])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


# Real servers need 32 numbers a head.
size = "hidden=128,layers=4,heads=4,kv_heads=2,intermediate=384,vocab=64" if args.also else ""
flags = {
    "vllm": ["--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
             "--max-num-seqs", "16", "--served-model-name", "policy"],
    "sglang": ["--skip-server-warmup", "--dtype", "float32", "--served-model-name", "policy", "--device", "cpu", "--disable-radix-cache",
               "--max-running-requests", "16", "--mem-fraction-static", "0.2"],
}
recipe = ["pipelines/recipes/grpo.toml"]
sets = lambda *keys: [word for key in keys for word in ("--set", key)]
# Real servers take a second to load a version.
small = sets("batch.groups=64" if args.also else "batch.groups=8", "generate.group_size=4", "generate.max_new_tokens=24", "generate.max_num_seqs=40", "filter=[]",
             'reward={kind="regex",pattern="[0-9]"}')


def model(seed):
    """Weights of a short run. Those of different seeds have nothing in common."""
    out = work / f"model-{seed}"
    of = sets(f"seed={seed}", "train.steps=2", "checkpoint.every=2", "sft.steps=5", *([f'model={{kind="tiny",{size}}}'] if size else []))
    if start(f"model-{seed}.log", "run", *recipe, "--out", out, *small, *of).wait():
        sys.exit((work / f"model-{seed}.log").read_text())
    folder = out / "checkpoints/step_000002"
    # vLLM reads every safetensors file, also the optimizer's state.
    only_model = shutil.ignore_patterns("optimizer*", "*.jsonl")
    return untied(shutil.copytree(folder, work / f"untied-{seed}", ignore=only_model)) if args.also else folder


base, others = model(0), model(1)
members = [Member(*also.split("=", 1)) for also in args.also] + [Member() for _ in range(1 if args.also else 3)]
write_list()
carry = "folder" if args.also else "stream"
engine = f'engine={{kind="rollflow",members="{work}/members.txt",carry="{carry}",hedge_after=3,drain_timeout=5,pause_timeout=5,load_timeout=20}}'
run = start("run.log", "run", *recipe, "--out", work / "run", *small, "--metrics", f"127.0.0.1:{metrics_port}",
            *sets(f'model={{kind="folder",path="{base}"}}', engine, "train.steps=1000000", "sft.steps=1", "train.lr=1e-9", "train.target_reward=2",
                  "flow.max_staleness=3", "observe.rollouts_every=1", "checkpoint.every=50"))
for _ in range(600):
    time.sleep(0.5)
    check_run()
    try:
        if tokens() > 0:
            break
    except OSError:
        pass
else:
    sys.exit("test_fleet: no token:\n" + (work / "run.log").read_text()[-3000:])

also = [text.split("=", 1)[0] for text in args.also]
chosen = [beyond for count in range(len(also) + 1) for beyond in itertools.combinations(also, count)]
# The last is what the events begin with.
every_set = [(own, beyond) for own in ((0, 2, 1) if also else (3, 2, 1, 4)) for beyond in chosen if own or beyond]
before = calm(every_set)
done, later, next_event, seconds_well, could, loads, useful = collections.Counter(), [], 0.0, 0.0, 0.0, [], []
trace = open(work / "trace.jsonl", "w", buffering=1)
# Of each server, because those of one that left end.
counted = {"engine_duplicates_total": {}, "engine_moved_total": {}, "engine_requests_total": {}}


def events(now, passed):
    global next_event, seconds_well, could
    page = scrape()
    for name, found in counted.items():
        for labels, number in page[f"rollflow_{name}"].items():
            found[labels] = max(number, found.get(labels, 0))
    useful.append(value(page, "engines_useful"))
    loads.append(os.getloadavg()[0])
    well = [member for member in members if member.look()]
    own = {f"{member.kind} {member.port}": member.ill or ("well" if member in well else "away") for member in members if member.listed}
    servers = {name: {labels: number for labels, number in page[f"rollflow_engine_{name}"].items() if number or name != "state"}
               for name in ("requests_in_flight", "requests_limit", "state", "weight_version")}
    trace.write(json.dumps({"at": round(now, 2), "tokens": value(page, "generated_tokens_total"), "version": value(page, "weight_version", "generator"),
                            "members": own, **servers}) + "\n")
    seconds_well += passed * len(well)
    could += passed * before.get(kinds(well), 0)
    for entry in [entry for entry in later if now > entry[0]]:
        entry[1]()
        later.remove(entry)
    if now < next_event:
        return
    next_event += args.every
    choices = ["killed", "stopped", "cut off"] if len(well) > 1 else []
    choices += ["added"] if sum(member.listed for member in members) < 4 else []
    choices += ["taken away"] if len(well) > 2 else []
    if not choices:
        return
    what = draw.choice(choices)
    if what == "added":
        members.append(Member())
    else:
        own = ["killed", "taken away"]
        some = [member for member in well if member.kind == "rollflow" or what not in own]
        if not some:
            return
        member = draw.choice(some)
        if what == "taken away":
            member.leave()
            # As a cluster does it: off the list, then ended.
            later.append((now + 8, member.end))
        else:
            member.fall(what)
            later.append((now + draw.uniform(0.3, 1.5) * args.every, member.heal))
    done[what] += 1
    write_list()


during = rate(args.minutes * 60, events)
for _, what in later:
    what()
after = calm(every_set[-4:][::-1])
last = scrape()
run.send_signal(signal.SIGTERM)
code = run.wait(120)
rows = [json.loads(line) for line in open(work / "run/metrics.jsonl")]
steps = [row["step"] for row in rows]
trained = collections.Counter()
for line in open(work / "run/rollouts.jsonl"):
    row = json.loads(line)
    trained[row["group"], row["index"]] += 1
groups = {group for group, _ in trained}
gap = max(row["log_prob_gap_max_nats"] for row in rows)
seconds = args.minutes * 60
# The machine's other work is the same before, during and after, or the figures say nothing.
could *= (1 + sum(after.values()) / sum(before[servers] for servers in after)) / 2 / seconds
problems = [text for text, wrong in [
    (f"the run ended with code {code}", code not in (0, 75)),
    (f"the ledger does not balance: {last['rollflow_ledger_imbalance']}", any(last["rollflow_ledger_imbalance"].values())),
    ("a sample was trained twice", max(trained.values()) > 1),
    ("a sample was left out", len(trained) != 4 * len(groups) or sorted(groups) != list(range(len(groups)))),
    (f"log-probabilities differ by {gap}: tokens of other weights", gap > 1e-2),
    ("a step is missing", steps != list(range(1, len(steps) + 1))),
] if wrong]
rounded = lambda rates: {count: round(rate) for count, rate in sorted(rates.items())}
print(json.dumps({
    "events": dict(done), "steps": len(steps), "samples": len(trained),
    "tokens_per_second": {"by_servers_before": rounded(before), "by_servers_after": rounded(after), "during": round(during), "possible": round(could)},
    "ratio": round(during / could, 3), "servers_well": round(seconds_well / seconds, 2), "useful": [round(min(useful), 1), round(max(useful), 1)],
    "load": {"mean": round(sum(loads) / len(loads), 1), "processors": os.cpu_count()},
    **{name.split("_")[1]: sum(found.values()) for name, found in counted.items()},
    "staleness_max": max(row["sample_staleness_max_versions"] for row in rows), "gap_max": gap, "folder": str(work),
}, indent=1))
sys.exit("; ".join(problems) or None)
