"""Follows the folder of a run and logs it to a tracker, in a process apart, so that a slow tracker slows no run.

    python3 track.py wandb runs/mine '{"project": "rollflow"}'

Ends when its standard input does and everything is logged, with the state in which the run ended. `FOLDER/trackers/KIND.json` keeps the
tracker's run and the last step that it has, so that a run that is resumed goes on in the same one. Steps that a resume repeats are not
logged twice.
"""
import fcntl
import json
import os
import pathlib
import posixpath
import re
import secrets
import select
import sys

COLUMNS = ["step", "group", "sample", "reward", "status", "prompt", "response"]


class Wandb:
    def __init__(self, settings, state, config, folder):
        import wandb

        if settings.get("offline"):
            os.environ["WANDB_MODE"] = "offline"
        self.module = wandb
        self.run = wandb.init(
            project=settings["project"], name=named(settings, folder), entity=settings.get("entity"), id=state.get("id"), resume="allow",
            dir=str(folder), config=config)
        self.id = self.run.id

    def log(self, step, values):
        self.run.log(values, step=step)

    def samples(self, step, rows):
        self.run.log({"samples": self.module.Table(columns=COLUMNS, data=rows)}, step=step)

    def finish(self, state):
        # 0 for a run that finished or was drained.
        self.run.finish(exit_code=0 if state in ("finished", "drained") else 1)


class Trackio:
    def __init__(self, settings, state, config, folder):
        import trackio

        # trackio finds a run by its name alone.
        self.module, self.id = trackio, state.get("id") or f"{named(settings, folder)}-{secrets.token_hex(3)}"
        self.run = trackio.init(project=settings["project"], name=self.id, resume="allow" if state else "never", config=config)

    def log(self, step, values):
        self.module.log(values, step=step)

    def samples(self, step, rows):
        import pandas

        self.module.log({"samples": self.module.Table(dataframe=pandas.DataFrame(rows, columns=COLUMNS))}, step=step)

    def finish(self, state):
        self.module.finish()


class Mlflow:
    def __init__(self, settings, state, config, folder):
        import mlflow

        self.module = mlflow
        if settings.get("uri"):
            mlflow.set_tracking_uri(settings["uri"])
        mlflow.set_experiment(settings["project"])
        self.run = mlflow.start_run(run_id=state.get("id"), run_name=named(settings, folder))
        self.id = self.run.info.run_id
        if not state:
            params = [(self.key(key), str(value)[:500]) for key, value in config.items()]
            for at in range(0, len(params), 100):  # The most that a server takes at a time.
                mlflow.log_params(dict(params[at : at + 100]))

    @staticmethod
    def key(name):
        """The name, with `_` for each character that MLflow's names can't have. They are paths, too."""
        return posixpath.normpath(re.sub(r"[^0-9A-Za-z_\-. :/]", "_", name))

    def log(self, step, values):
        finite = {self.key(key): value for key, value in values.items() if value == value and abs(value) != float("inf")}
        self.module.log_metrics(finite, step=step)

    def samples(self, step, rows):
        self.module.log_table({column: [row[at] for row in rows] for at, column in enumerate(COLUMNS)}, artifact_file="samples.json")

    def finish(self, state):
        self.module.end_run({"finished": "FINISHED", "drained": "KILLED", "stopped": "KILLED"}.get(state, "FAILED"))


class Lines:
    """The whole lines of a file that grows, and that a resume may have cut."""

    def __init__(self, path):
        self.path, self.at = path, 0

    def new(self):
        if not self.path.exists():
            return
        if self.path.stat().st_size < self.at:
            self.at = 0
        with open(self.path, "rb") as file:
            file.seek(self.at)
            while (line := file.readline()).endswith(b"\n"):
                self.at += len(line)
                yield json.loads(line)


def flattened(table, prefix=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def recipe(folder):
    text = (folder / "recipe.toml").read_text()
    try:
        import tomllib
    except ImportError:  # Before Python 3.11.
        return {"recipe": text}
    return dict(flattened(tomllib.loads(text)))


def named(settings, folder):
    """The recipe's name with that of the run's folder, by which runs of one recipe differ."""
    # A part of a run is a folder in it.
    run = (folder.parent if (folder.parent / "recipe.toml").exists() else folder).name
    return run if run.startswith(settings["name"]) else f"{settings['name']}-{run}"


def state_of(folder):
    """The run's state in its record, which still says `running` if its process was killed."""
    record = folder / "run.json"
    return json.loads(record.read_text())["state"] if record.exists() else "finished"


def text(prompt):
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)


class Follower:
    def __init__(self, kind, folder, settings):
        self.file, self.settings = folder / "trackers" / f"{kind}.json", settings
        self.state = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.metrics, self.timings, self.rollouts = (Lines(folder / name) for name in ["metrics.jsonl", "timings.jsonl", "rollouts.jsonl"])
        tracker = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}[kind]
        self.tracker = tracker(settings, self.state, recipe(folder), folder)
        self.state = {"step": 0, **self.state, "id": self.tracker.id}
        self.times, self.samples = {}, {}
        self.save()

    def save(self):
        written = self.file.with_suffix(".writing")
        written.write_text(json.dumps(self.state))
        written.replace(self.file)

    def follow(self):
        """Logs what is new."""
        # First: a step's row is written after its times and its samples.
        steps = list(self.metrics.new())
        for row in self.timings.new():
            self.times[row["step"]] = {f"timing/{key}": value for key, value in row.items() if key != "step" and not key.startswith("stage_")}
        for row in self.rollouts.new():
            if self.settings["samples"] and row["step"] > self.state["step"]:
                rows = self.samples.setdefault(row["step"], [])
                if len(rows) < self.settings["samples"]:
                    rows.append([row["step"], row.get("group"), row.get("index"), row.get("reward"), row.get("status"),
                                 text(row.get("prompt", "")), row.get("response", "")])
        for row in steps:
            step = row.pop("step")
            times = self.times.pop(step, {})
            if step <= self.state["step"]:
                continue
            self.tracker.log(step, {key: float(value) for key, value in {**row, **times}.items()})
            if rows := self.samples.pop(step, None):
                self.tracker.samples(step, rows)
            self.state["step"] = step
            self.save()


def main(kind, folder, settings):
    folder = pathlib.Path(folder).resolve()
    # The process of a run that was killed may still log; the next one continues from what it leaves.
    lock = open(folder / "trackers" / f"{kind}.lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    follower = Follower(kind, folder, json.loads(settings))
    while True:
        ended = bool(select.select([sys.stdin], [], [], 1.0)[0])
        follower.follow()
        if ended:
            break
    follower.tracker.finish(state_of(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
