#!/usr/bin/env python3
"""Writes expressions.jsonl: small tasks of arithmetic on x and y, each with one right expression and three asserts about f(x, y).

The same file every time: python3 pipelines/data/expressions.py
"""

import json
import pathlib

WORDS = {"sum": "x+y", "product": "x*y", "difference": "x-y", "first": "x", "second": "y"}
ONE = {"add": "+", "times": "*", "less": "-"}
INPUTS = [(7, 2), (3, 5), (10, 4)]


def task(prompt, code):
    tests = [f"assert f({x}, {y}) == {eval(code, {'x': x, 'y': y})}" for x, y in INPUTS]
    return {"prompt": prompt + ":", "answer": code, "tests": tests}


tasks = []
for word, base in WORDS.items():
    tasks.append(task(word, base))
    for verb, sign in ONE.items():
        for number in range(1, 10):
            wrapped = f"({base})" if sign == "*" and len(base) > 1 else base
            tasks.append(task(f"{word} {verb} {number}", f"{wrapped}{sign}{number}"))

path = pathlib.Path(__file__).with_name("expressions.jsonl")
path.write_text("".join(json.dumps(each) + "\n" for each in tasks))
print(len(tasks), "tasks in", path)
