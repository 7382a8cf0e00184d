"""Clients of the Tinker API against rollflow, and rollflow against SkyRL: test.py SERVER_VENV CLIENT_VENV."""
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

server, client = map(pathlib.Path, sys.argv[1:])
ROLLFLOW = "target/release/rollflow"
RECIPE = "pipelines/recipes/grpo_tinker.toml"
folder = pathlib.Path(tempfile.mkdtemp())
model = folder / "model"


def run(*command, **variables):
    subprocess.run(list(map(str, command)), check=True, env={**os.environ, "TINKER_API_KEY": "tml-local", **variables})


def port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def serving(command, at, log, **variables):
    with open(folder / log, "w") as out:
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=out, start_new_session=True, cwd=variables.pop("cwd", None),
                                   env={**os.environ, **variables})
    url = f"http://127.0.0.1:{at}"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=1)
                break
            if process.poll() is not None:
                sys.exit((folder / log).read_text()[-3000:])
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def skyrl(devices, at):
    config = {"max_lora_adapters": 4, "max_lora_rank": 16, "train_micro_batch_size": 8, "sample_max_num_sequences": 64,
              "fully_sharded_data_parallel_size": devices}
    # The server finds `uv run` among its parents, and starts its trainer by it.
    command = [server / "bin/uv", "run", "--active", "--no-project", "-m", "skyrl.tinker.api", "--base-model", model, "--backend", "jax",
               "--backend-config", json.dumps(config), "--checkpoints-base", folder / f"checkpoints-{devices}",
               "--database-url", f"sqlite:///{folder}/tinker-{devices}.db", "--host", "127.0.0.1", "--port", at]
    return serving(command, at, f"skyrl-{devices}.log", cwd=folder, VIRTUAL_ENV=str(server), UV_OFFLINE="1", JAX_PLATFORMS="cpu",
                   PATH=f"{server}/bin:{os.environ['PATH']}", HF_HUB_OFFLINE="1",
                   XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}")


def learns(url, name, steps):
    out = folder / name
    run(ROLLFLOW, "run", RECIPE, "--out", out, "--set", f"trainer.url={url!r}", "--set", f"train.steps={steps}",
        "--set", "observe.progress=false", "--set", "observe.log_every=20")
    rewards = [json.loads(line)["reward_mean"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    first, last = sum(rewards[:20]) / 20, sum(rewards[-20:]) / 20
    print(f"{name}: mean reward of the first 20 steps {first:.3f}, of the last 20 {last:.3f}")
    assert last > first + 0.03, "it did not learn"
    run(ROLLFLOW, "export", out, folder / f"{name}-adapter", "--adapter")


run(ROLLFLOW, "run", "pipelines/recipes/sft.toml", "--out", folder / "begun", "--set", "sft.steps=110", "--set", "observe.progress=false")
run(ROLLFLOW, "export", folder / "begun", model)
at = port()
command = [ROLLFLOW, "serve", model, "--tinker", "--state", folder / "state", "--listen", f"127.0.0.1:{at}", "--max-models", 64, "--slots", 128]
with serving(command, at, "rollflow.log") as url:
    for venv in [server, client]:
        run(venv / "bin/python", "scripts/tinker/sdk.py", url, "model", "docs/how_to/tinker.md")
    run(client / "bin/python", "scripts/tinker/cookbook.py", url, model, model)
    learns(url, "rollflow", 200)
for devices, steps in [(1, 150), (2, 150)]:
    at = port()
    with skyrl(devices, at) as url:
        if devices == 1:
            run("cargo", "test", "--test", "training", "another_server", "--", "--ignored", "--nocapture", TINKER_URL=url, TINKER_MODEL=str(model))
        learns(url, f"skyrl-{devices}", steps)
print("all passed")
