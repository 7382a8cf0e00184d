"""What the package does without a run: descriptions of tools, recipes as TOML, sources of notebooks."""
import functools
import json
import linecache
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import typing
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from rollflow import Flow, reward  # noqa: E402
from rollflow.loading import Refused, load  # noqa: E402
from rollflow.running import Run, RunFailed, inline, toml  # noqa: E402
from rollflow.sources import files_of, source_of  # noqa: E402
from rollflow.tools import describe  # noqa: E402


def at_top(completion):
    return 1.0


class Wide(float):
    """A number of NumPy: a float whose `repr` is a call."""

    def __repr__(self):
        return f"np.float64({float(self)})"


class Truth:
    """A value of NumPy that is no type of Python."""

    def __init__(self, value):
        self.value = value

    def __bool__(self):
        return bool(self.value)

    def tolist(self):
        return self.value


class Tools(unittest.TestCase):
    def test_descriptions_equal_those_of_transformers(self):
        golden = json.loads((HERE / "golden_tools.json").read_text())
        for name, expected in golden.items():
            found = describe(load(str(HERE / "golden_tools.py"), name))
            self.assertEqual(found, {key: expected["function"][key] for key in ("name", "description", "parameters")}, name)

    def test_what_cannot_be_described_is_named(self):
        def untyped(a):
            """A."""

        def variadic(*values: int):
            """A."""

        def odd(a: typing.Callable):
            """A."""

        for function, why in [(untyped, "`a` has no type hint"), (variadic, "takes `*values"), (odd, "has the type typing.Callable")]:
            with self.assertRaisesRegex(Refused, why.replace("*", r"\*")):
                describe(function)


class Recipes(unittest.TestCase):
    @unittest.skipIf(sys.version_info < (3, 11), "tomllib is new in Python 3.11")
    def test_toml_reads_back_as_it_was(self):
        import tomllib

        recipe = {"name": 'a "quoted"\nname é', "seed": 3, "model": {"kind": "tiny", "lr": 1e-06, "on": True, "list": [1, 2], "in": {"a b": "c"}}}
        self.assertEqual(tomllib.loads(toml(recipe)), recipe)

    def test_numbers_of_numpy_are_written_as_those_of_python(self):
        self.assertEqual(inline([Wide(0.5), Truth(True), Truth([1, 2])]), "[0.5, true, [1, 2]]")

    def test_a_flow_becomes_arguments_with_parts_of_a_reward(self):
        weighted = reward(name="right", weight=0.5)(at_top)
        with tempfile.TemporaryDirectory() as folder:
            flow = Flow("a.toml", reward=[weighted, os.path.basename][:1], python="py", set={"train.lr": 1e-4})
            file, one, *rest = flow.arguments(folder)
            self.assertEqual((file, one, rest[-1]), ("a.toml", "--set", "train.lr=0.0001"))
            self.assertIn(f'"file" = {inline(os.path.abspath(__file__))}', rest[0])
            two = Flow({"seed": 1}, reward=[weighted, at_top]).arguments(folder)
            self.assertEqual(pathlib.Path(two[0]).read_text(), "seed = 1\n")
            self.assertIn('"name" = "right", "weight" = 0.5', two[2])

    def test_what_has_no_name_at_the_top_of_a_file_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(ValueError, "needs a name at the top of a file"):
                files_of([lambda completion: 1.0], folder)
            with self.assertRaisesRegex(ValueError, "give the class"):
                Flow("a.toml", reward=Tools()).arguments(folder)


    def test_a_decorated_function_is_in_its_own_file_and_not_in_that_of_the_decorator(self):
        with tempfile.TemporaryDirectory() as folder:
            wrapper, file = pathlib.Path(folder, "wrapper_of_test.py"), pathlib.Path(folder, "reward_of_test.py")
            wrapper.write_text(
                "import functools\n\ndef twice(function):\n    @functools.wraps(function)\n"
                "    def wrapped(completion):\n        return 2 * function(completion)\n    return wrapped\n"
            )
            file.write_text("from wrapper_of_test import twice\n\n@twice\ndef length(completion):\n    return len(completion)\n")
            [(found, name)] = files_of([load(str(file), "length")], folder)
            self.assertEqual((found, load(found, name)("abc")), (str(file), 6))
            # What another module makes of it has its name, and is not what a run would load.
            with self.assertRaisesRegex(ValueError, "another function than the one given"):
                files_of([functools.lru_cache(load(str(file), "length"))], folder)


RESUMED = """
import os, pathlib, signal, sys, time
metrics, go = map(pathlib.Path, sys.argv[1:])
signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
while not go.exists():
    time.sleep(0.01)
with open(metrics, "r+b") as file:
    file.truncate(file.read().index(b"\\n") + 1)
    file.seek(0, os.SEEK_END)
    file.writelines(b'{"step": %d, "loss": 0.12345}\\n' % step for step in (2, 3, 4))
while True:
    signal.pause()
"""


class Runs(unittest.TestCase):
    def test_rows_follow_a_resume_to_its_drain_and_repeat_no_step_of_an_earlier_session(self):
        with tempfile.TemporaryDirectory() as folder:
            metrics, go = (os.path.join(folder, name) for name in ("metrics.jsonl", "go"))
            pathlib.Path(metrics).write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
            run = Run([sys.executable, "-c", RESUMED, metrics, go], folder, os.path.join(folder, "log"))
            with run:
                rows = iter(run)
                pathlib.Path(go).touch()
                self.assertEqual(next(rows), {"step": 4, "loss": 0.12345})
                run.drain()
                self.assertEqual(list(rows), [])
            run.drained = False
            with self.assertRaisesRegex(RunFailed, "code 75"):
                run.wait()

    def test_a_run_in_a_used_folder_yields_no_row_of_the_other_run(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "metrics.jsonl").write_text('{"step": 1}\n')
            run = Run([sys.executable, "-c", "import sys; sys.exit('the folder holds a run')"], folder, os.path.join(folder, "log"))
            with self.assertRaisesRegex(RunFailed, "the folder holds a run"):
                next(iter(run))

    def test_a_run_does_not_outlive_the_program_that_started_it(self):
        waits = "import pathlib, signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit(75)); pathlib.Path(sys.argv[1]).touch(); signal.pause()"
        starts = (
            "import os, sys, time; from rollflow.running import Run; folder, waits = sys.argv[1:]; ready = os.path.join(folder, 'ready')\n"
            "run = Run([sys.executable, '-c', waits, ready], folder, os.path.join(folder, 'log'))\n"
            "while not os.path.exists(ready): time.sleep(0.01)\n"
            "print(run.process.pid); raise KeyboardInterrupt"
        )
        with tempfile.TemporaryDirectory() as folder:
            ended = subprocess.run([sys.executable, "-c", starts, folder, waits], cwd=HERE.parent, capture_output=True, text=True, timeout=60)
            self.assertIn(f"the run in {folder} is drained", ended.stderr)
            with self.assertRaises(ProcessLookupError):
                os.kill(int(ended.stdout), 0)

    def test_files_of_a_run_are_utf_8_in_every_locale(self):
        with tempfile.TemporaryDirectory() as folder:
            writes = "import sys; from rollflow import Flow; Flow({'name': '\\u6f22'}).arguments(sys.argv[1])"
            environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
            subprocess.run([sys.executable, "-c", writes, folder], cwd=HERE.parent, env=environment, check=True)
            self.assertEqual(pathlib.Path(folder, "recipe.toml").read_text(encoding="utf-8"), 'name = "漢"\n')

    def test_samples_leave_out_a_line_that_is_being_written(self):
        with tempfile.TemporaryDirectory() as folder:
            run = Run([sys.executable, "-c", ""], folder, os.path.join(folder, "log"))
            run.wait()
            pathlib.Path(folder, "rollouts.jsonl").write_bytes('{"response": "é"}\n{"response": "é'.encode()[:-1])
            self.assertEqual(list(run.samples()), [{"response": "é"}])


def cell(source):
    """What a notebook does: compiled text without a file, whose lines `inspect` finds."""
    name = f"cell{len(linecache.cache)}"
    linecache.cache[f"<{name}>"] = (len(source), None, source.splitlines(True), f"<{name}>")
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    return module


class Notebooks(unittest.TestCase):
    def written(self, *targets):
        with tempfile.TemporaryDirectory() as folder:
            found = files_of(targets, folder)
            self.assertEqual(len({file for file, _ in found}), 1)
            return [load(file, name) for file, name in found]

    def test_a_function_of_a_notebook_becomes_a_file_with_what_it_uses(self):
        module = cell(
            "import math\nfrom collections import Counter\nSCALE = 2.0\n\n\n"
            "def helper(text):\n    return sum(Counter(text).values()) * SCALE\n\n\n"
            "class Base:\n    def factor(self):\n        return 1\n\n\n"
            "class Grader(Base):\n    def __call__(self, completion):\n        return math.sqrt(helper(completion)) * self.factor()\n"
        )
        [grader] = self.written(module.Grader)
        self.assertEqual(grader()("12345678"), 4.0)

    def test_annotations_decorators_defaults_constants_and_static_functions_come_with_it(self):
        module = cell(
            "import re, dataclasses\nfrom typing import List, Optional\nfrom rollflow import reward\n"
            "SCALE, LIMIT, WORDS = 2.0, float('inf'), re.compile('[a-z]+', re.I)\nmatch = object()\nTASKS = ['1+1=']\n\n\n"
            "@reward(weight=0.5)\ndef graded(completions: List[str], scale: Optional[float] = SCALE):\n"
            "    return [min(len(WORDS.match(text).group()) * scale, LIMIT) for text in completions]\n\n\n"
            "@dataclasses.dataclass\nclass Sums:\n    limit: float = LIMIT\n\n"
            "    @staticmethod\n    def tasks():\n        return TASKS\n"
        )
        graded, sums = self.written(module.graded, module.Sums)
        self.assertEqual((graded(["Ab1"]), graded.rollflow_part["weight"]), ([4.0], 0.5))
        self.assertEqual((sums(limit=3.0), sums.tasks()), (sums(3.0), ["1+1="]))
        module = cell(
            "import enum, functools\n\n\nclass Kind(enum.Enum):\n    LONG = 3\n\n\n@functools.lru_cache\ndef length(text):\n    return len(text)\n\n\n"
            "is_long = lambda text: length(text) > Kind.LONG.value\nis_short = lambda text: not is_long(text)\n\n\n"
            "def long(completion):\n    return 1.0 if is_long(completion) and not is_short(completion) else 0.0\n"
        )
        [long] = self.written(module.long)
        self.assertEqual((long("abcd"), long("abc")), (1.0, 0.0))
        for value in ["{'a': print}", "object()", "__import__('typing').TypeVar('T')"]:
            module = cell(f"VALUE = {value}\n\n\ndef uses(completion):\n    return VALUE\n")
            with self.assertRaisesRegex(ValueError, "uses VALUE, a "):
                source_of(module.uses)

    def test_a_function_with_the_name_of_a_builtin_comes_with_it(self):
        module = cell("def sum(values):\n    return 7.0\n\n\ndef graded(completion):\n    return sum([len(completion)])\n")
        [graded] = self.written(module.graded)
        self.assertEqual(graded("ab"), 7.0)
        # IPython gives cells an `open`, whose code is IPython's.
        module = cell("def read(path):\n    with open(path) as file:\n        return file.read()\n")
        module.open = types.FunctionType((lambda *args: None).__code__, {"__name__": "IPython.core.interactiveshell"}, "open")
        module.open.__module__ = "io"
        [read] = self.written(module.read)
        self.assertIs(read.__globals__["__builtins__"]["open"], open)
        self.assertNotIn("open", read.__globals__)

    def test_tools_and_an_environment_of_a_notebook_go_into_one_file(self):
        module = cell(
            "LIMIT = 3\n\n\ndef add(a: int):\n    return a + LIMIT\n\n\ndef subtract(a: int):\n    return a - LIMIT\n\n\n"
            "class Game:\n    def reset(self):\n        return add(1)\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            arguments = Flow("a.toml", environment=module.Game, tools=[module.add, module.subtract]).arguments(folder)
            self.assertIn('"environment" = "Game", "tools" = ["add", "subtract"]', arguments[2])
            [file] = pathlib.Path(folder).iterdir()
            self.assertEqual((load(str(file), "Game")().reset(), load(str(file), "subtract")(1)), (4, -2))


if __name__ == "__main__":
    unittest.main()
