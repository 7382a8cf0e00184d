#!/usr/bin/env python3
"""Counts words that plain English does without, in comments, recipe help and documents, and fails above a budget.

With `--list` it prints every use. Lower BUDGET whenever main has fewer, so that the count only falls.
"""
import pathlib
import re
import subprocess
import sys

BUDGET = 16
WORDS = re.compile(
    r"\b(anew|whoever|nobody|somebody|is told|are told|is said|in the place of|manieth|mend(?:s|ed)?|beside|becomes of|so that none|"
    r"tells? (?:its|their) word|for good|every so many|of its own|as it is|goes on|go on|stands? in|behind|at once|thereby|hereby|whereof)\b",
    re.I,
)


def prose(path):
    """Yields the lines of prose of a file, each with its number: whole pages, and comments of source."""
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if path.suffix == ".md":
            yield number, line
        elif comment := re.match(r"\s*(?://[/!]?|#) ?(.*)", line):
            yield number, comment[1]


def main():
    files = subprocess.check_output(["git", "ls-files", "*.md", "src/*.rs", "crates/*/src/*.rs", "pipelines/src/*.rs", "examples/*.rs", "pipelines/recipes/*.toml"], text=True).split()
    files = [pathlib.Path(file) for file in files if not file.startswith("tests/") and not file.endswith("CHANGELOG.md")]
    uses = [(file, number, use[0]) for file in files if file.exists() for number, line in prose(file) for use in WORDS.finditer(line)]
    if "--list" in sys.argv or len(uses) > BUDGET:
        for file, number, word in uses:
            print(f"{file}:{number}: {word}")
    print(f"{len(uses)} words to replace, of at most {BUDGET}")
    sys.exit(len(uses) > BUDGET)


main()
