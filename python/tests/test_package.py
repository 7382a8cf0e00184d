"""What the package does without a run: descriptions of tools, recipes as TOML, sources of notebooks."""
import json
import os
import pathlib
import sys
import tempfile
import typing
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from rollflow import Flow, reward  # noqa: E402
from rollflow.loading import Refused, load  # noqa: E402
from rollflow.running import inline, toml  # noqa: E402
from rollflow.sources import file_of, source_of  # noqa: E402
from rollflow.tools import describe  # noqa: E402


def at_top(completion):
    return 1.0


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
                file_of(lambda completion: 1.0, folder)


class Notebooks(unittest.TestCase):
    def test_a_function_of_a_notebook_becomes_a_file_with_what_it_uses(self):
        source = (
            "import math\nfrom collections import Counter\nSCALE = 2.0\n\n\n"
            "def helper(text):\n    return Counter(text).total() * SCALE\n\n\n"
            "class Base:\n    def factor(self):\n        return 1\n\n\n"
            "class Grader(Base):\n    def __call__(self, completion):\n        return math.sqrt(helper(completion)) * self.factor()\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            # As a notebook does: compiled text without a file, whose lines `inspect` finds.
            import linecache
            import types

            linecache.cache["<cell>"] = (len(source), None, source.splitlines(True), "<cell>")
            cell = types.ModuleType("cell")
            sys.modules["cell"] = cell
            exec(compile(source, "<cell>", "exec"), cell.__dict__)
            file = pathlib.Path(folder) / "written.py"
            file.write_text(source_of(cell.Grader))
            grader = load(str(file), "Grader")()
            self.assertEqual(grader("12345678"), 4.0)


if __name__ == "__main__":
    unittest.main()
