"""Runs of the program `rollflow`: from a recipe and Python functions to rows of metrics."""
import atexit
import itertools
import json
import numbers
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from .sources import files_of

# Environment variable of processes that a run starts to call functions of a file.
IN_WORKER = "ROLLFLOW_WORKER"
POLL = 0.1
LAST_LINES = 20
# Exit code of a resumed run that was drained before its last step.
DRAINED = 75


class RunFailed(Exception):
    """The run ended with an error; the text holds its last lines."""


def reward(function=None, *, name=None, weight=1.0):
    """Marks a function as a part of a reward, with its name in metrics and its weight in the sum."""

    def mark(function):
        function.rollflow_part = {"name": name or function.__name__, "weight": float(weight)}
        return function

    return mark(function) if function is not None else mark


class Flow:
    """A recipe with changes.

    Args:
        recipe: A recipe file, or a dict with a recipe's sections.
        reward: A reward function, or a list of them, whose weighted sum is the reward.
        environment: A class of environments, for rollouts of several turns.
        tools: Functions that the model may call.
        python: Interpreter that calls them; this one by default.
        set: Changes of the recipe by key, such as {"train.lr": 1e-4}.
    """

    def __init__(self, recipe, *, reward=None, environment=None, tools=(), python=None, set=None):
        self.recipe, self.python = recipe, python
        self.rewards = [] if reward is None else list(reward) if isinstance(reward, (list, tuple)) else [reward]
        self.environment, self.tools = environment, list(tools)
        self.changes = dict(set or {})

    def arguments(self, folder):
        """Returns the arguments of `rollflow run`. Files that it needs are written into `folder`."""
        recipe = self.recipe
        if isinstance(recipe, dict):
            recipe = os.path.join(folder, "recipe.toml")
            with open(recipe, "w", encoding="utf-8") as file:
                file.write(toml(self.recipe))
        changes = {}
        if self.environment or self.tools:
            changes["environment"] = self.environment_section(folder)
        if len(self.rewards) == 1:
            changes["reward"] = self.reward_keys(self.rewards[0], folder)
        elif self.rewards:
            parts = [{**mark(function), **self.reward_keys(function, folder)} for function in self.rewards]
            changes["reward"] = {"kind": "parts", "part": parts}
        changes.update(self.changes)
        settings = [part for key, value in changes.items() for part in ("--set", f"{key}={inline(value)}")]
        return [os.fspath(recipe), *settings]

    def reward_keys(self, function, folder):
        [(file, name)] = files_of([function], folder)
        return {"kind": "python", "file": file, "function": name, "python": self.interpreter()}

    def environment_section(self, folder):
        found = files_of([one for one in [self.environment, *self.tools] if one is not None], folder)
        files = sorted({file for file, _ in found})
        if len(files) > 1:
            raise ValueError(f"environment and tools are in several files ({', '.join(files)}); put them into one")
        names = [name for _, name in found]
        section = {"kind": "python", "file": files[0], "python": self.interpreter()}
        if self.environment is not None:
            section["environment"] = names.pop(0)
        return {**section, **({"tools": names} if names else {})}

    def interpreter(self):
        return os.fspath(self.python or sys.executable)


def mark(function):
    return getattr(function, "rollflow_part", None) or {"name": getattr(function, "__name__", "reward"), "weight": 1.0}


def run(flow, *, out=None, program=None, args=()):
    """Starts a run and returns it; iterate over it for rows of metrics.

    Args:
        flow: A `Flow`, a recipe file, or a dict.
        out: Folder of the run; a new one in a temporary folder by default.
        program: Path of `rollflow`; by default $ROLLFLOW, or the one in PATH.
        args: Further arguments of `rollflow run`, such as ["--metrics", "127.0.0.1:9464"].
    """
    if os.environ.get(IN_WORKER):
        raise RuntimeError('run() was called while a run loads this file for its functions; put it under `if __name__ == "__main__":`')
    program = program or os.environ.get("ROLLFLOW") or shutil.which("rollflow")
    if not program:
        raise FileNotFoundError("the program rollflow is not in PATH; build it (README) and name it: program=..., or $ROLLFLOW")
    flow = flow if isinstance(flow, Flow) else Flow(flow)
    folder = tempfile.mkdtemp(prefix="rollflow-")
    out = os.path.abspath(out) if out else os.path.join(folder, "run")
    command = [program, "run", *flow.arguments(folder), "--out", out, *args]
    return Run(command, out, os.path.join(folder, "log"))


class Run:
    """A run. Iterating waits for rows of metrics until it ends; `RunFailed` if it ends with an error.

    A run that still goes on when this program ends, such as by Ctrl-C, is drained.
    """

    def __init__(self, command, out, log):
        self.out, self.log, self.drained = out, log, False
        self.metrics = os.path.join(out, "metrics.jsonl")
        # Where the last row of earlier sessions begins, the row, and its step.
        rows = self.read(0, b"")
        self.earlier = (*rows[-1], json.loads(rows[-1][1])["step"]) if rows else (0, b"", -1)
        with open(log, "wb") as output:
            # A group of its own, so that Ctrl-C in a notebook interrupts the loop and not the run.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        atexit.register(self.end)

    def __iter__(self):
        return self.rows()

    def rows(self):
        """Yields each row that is added to `metrics.jsonl` as a dict, as soon as it is written; none for steps that a resume repeats."""
        begun, last, step = self.earlier
        while True:
            ended, lines = self.process.poll() is not None, self.read(begun, last)
            # A resume truncates the file and writes the steps after its checkpoint again.
            if lines is None:
                begun, last = 0, b""
                continue
            for begun, last in lines:
                row = json.loads(last)
                if row["step"] > step:
                    step = row["step"]
                    yield row
            if ended:
                return self.check()
            time.sleep(POLL)

    def read(self, begun, last):
        """Returns the whole lines of `metrics.jsonl` after `last`, which begins at `begun`, each with its begin; None if `last` is not there."""
        data = b""
        if os.path.exists(self.metrics):
            with open(self.metrics, "rb") as file:
                file.seek(begun)
                data = file.read()
        if not data.startswith(last):
            return None
        lines = data[len(last) : data.rfind(b"\n") + 1].splitlines(keepends=True)
        begins = itertools.accumulate(map(len, lines), initial=begun + len(last))
        return list(zip(begins, lines))

    def wait(self):
        """Waits for the end of the run and returns the rows of metrics."""
        return list(self.rows())

    def samples(self):
        """Yields the recorded samples: text, tokens, reward, versions and more (docs/reference/run_folder.md)."""
        path = os.path.join(self.out, "rollouts.jsonl")
        if os.path.exists(path):
            with open(path, "rb") as file:
                for line in file:
                    # The last line may be in the middle of being written.
                    if line.endswith(b"\n"):
                        yield json.loads(line)

    def drain(self):
        """Ends the run after what is in flight, as Ctrl-C does; it can be resumed."""
        self.drained = True
        self.process.send_signal(signal.SIGINT)

    def end(self):
        """Drains a run that still goes on when this program ends, and waits for its end."""
        if self.process.poll() is None:
            print(f"rollflow: the run in {self.out} is drained, since this program ends; Ctrl-C stops it at once", file=sys.stderr, flush=True)
            self.drain()
            try:
                self.process.wait()
            except KeyboardInterrupt:
                self.drain()
                self.process.wait()

    def check(self):
        code = self.process.wait()
        atexit.unregister(self.end)
        if code != 0 and not (self.drained and code == DRAINED):
            with open(self.log, errors="replace") as file:
                lines = file.read().splitlines()[-LAST_LINES:]
            raise RunFailed(f"rollflow ended with code {code}:\n" + "\n".join(lines))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Drains the run if it still goes on, and waits for its end."""
        if self.process.poll() is None:
            self.drain()
        self.process.wait()
        atexit.unregister(self.end)


def inline(value):
    """Returns a value as TOML on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(str(key))} = {inline(one)}" for key, one in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(inline(one) for one in value) + "]"
    if hasattr(value, "tolist"):
        # Of NumPy or PyTorch.
        return inline(value.tolist())
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        return repr(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    return json.dumps(os.fspath(value), ensure_ascii=False)


def toml(recipe):
    """Returns a dict as TOML."""
    keys = [f"{key} = {inline(value)}\n" for key, value in recipe.items() if not isinstance(value, dict)]
    tables = [
        f"\n[{key}]\n" + "".join(f"{name} = {inline(one)}\n" for name, one in value.items())
        for key, value in recipe.items()
        if isinstance(value, dict)
    ]
    return "".join(keys + tables)
