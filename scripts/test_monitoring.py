"""Starts a run and a Prometheus on it, and asks every query of the dashboard and every rule: test_monitoring.py ROLLFLOW."""
import json
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

rollflow = sys.argv[1]
# Rows of the dashboard that an arithmetic run on a machine without GPUs has no data for, and charts of what has not happened.
ABSENT = {"Servers", "Environments", "GPUs"}


def free():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


folder = pathlib.Path(tempfile.mkdtemp())
scraped, port = free(), free()
subprocess.run([rollflow, "monitor", f"127.0.0.1:{scraped}", "--out", folder / "monitoring"], check=True, stdout=subprocess.DEVNULL)
for command in [["check", "config", folder / "monitoring/prometheus.yml"], ["check", "rules", folder / "monitoring/rules.yml"],
                ["test", "rules", "monitoring/rules_test.yml"]]:
    subprocess.run(["promtool", *command], check=True, stdout=subprocess.DEVNULL)
recipe = ["run", "pipelines/recipes/grpo.toml", "--out", folder / "run", "--metrics", f"127.0.0.1:{scraped}", "--set", "train.steps=100000",
          "--set", "train.target_reward=2", "--set", "checkpoint.every=20", "--set", "eval={every=10, samples=2, limit=20}",
          "--set", "train.schedule={kind='constant'}", "--set", "observe.progress=false"]
run = subprocess.Popen([rollflow, *recipe], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
prometheus = subprocess.Popen(
    ["prometheus", "--enable-feature=exemplar-storage", "--config.file", folder / "monitoring/prometheus.yml", "--storage.tsdb.path", folder / "data", "--web.listen-address",
     f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=open(folder / "log", "w"))


def ask(route, **query):
    address = f"http://127.0.0.1:{port}/api/v1/{route}?{urllib.parse.urlencode(query)}"
    return json.load(urllib.request.urlopen(address, timeout=10))["data"]


def value(query):
    return ask("query", query=query.replace("$instance", ".+").replace("$__rate_interval", "30s"))["result"]


try:
    deadline = time.time() + 180
    while True:
        assert run.poll() is None and prometheus.poll() is None and time.time() < deadline, "the run or Prometheus did not get on"
        try:
            if value("rollflow_checkpoint_step >= 20") and value("rollflow_eval_accuracy_ratio"):
                break
        except OSError:
            pass
        time.sleep(1)
    time.sleep(25)
    dashboard = json.loads((folder / "monitoring/dashboard.json").read_text())
    row, asked, empty = None, 0, []
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        for target in panel["targets"]:
            found = value(target["expr"])
            asked += 1
            if not found and row not in ABSENT:
                empty.append(f"{row}, {panel['title']}: {target['expr']}")
    assert not empty, "no data for:\n" + "\n".join(empty)
    groups = ask("rules")["groups"]
    for rule in [rule for group in groups for rule in group["rules"]]:
        assert rule["health"] == "ok", rule
        assert rule["type"] == "recording" or rule["state"] != "firing", f"a healthy run raised {rule['name']}: {rule}"
        assert rule["type"] != "recording" or value(rule["name"]), f"{rule['name']} has no data"
    now = time.time()
    exemplars = ask("query_exemplars", query="rollflow_sample_reward_bucket", start=now - 600, end=now)
    assert exemplars and exemplars[0]["exemplars"][0]["labels"]["group"].isdigit(), exemplars
    names = {series["__name__"] for series in ask("series", **{"match[]": '{job="rollflow"}'})}
    print(f"{asked} queries of {len(dashboard['panels'])} panels and {sum(len(g['rules']) for g in groups)} rules on {len(names)} metrics: right")
finally:
    for process in [run, prometheus]:
        process.send_signal(signal.SIGTERM)
    for process in [run, prometheus]:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
