#!/usr/bin/env python3
"""Writes preferences_addition.jsonl: pairs of completions to single-digit sums, of which the chosen one is right.

Each sum comes with six wrong completions: neighbours of the right one, other sums and babble. The last tenth of the lines has pairs of sums and wrong
completions that the others do not have. The same file every time: python3 pipelines/data/preferences.py
"""

import json
import pathlib
import random


def wrong(draw, right):
    kind = draw.randrange(3)
    if kind == 0:
        return str(max(0, right + draw.choice([-3, -2, -1, 1, 2, 3])))
    if kind == 1:
        return str(draw.randrange(19))
    return "".join(draw.choice("0123456789+-=ab") for _ in range(draw.randint(1, 3)))


def main():
    draw = random.Random(0)
    pairs = set()
    for a in range(10):
        for b in range(10):
            found = set()
            while len(found) < 6:
                completion = wrong(draw, a + b)
                if completion != str(a + b):
                    found.add(completion)
            pairs |= {(f"{a}+{b}=", str(a + b), completion) for completion in found}
    pairs = sorted(pairs)
    draw.shuffle(pairs)
    lines = [json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) for prompt, chosen, rejected in pairs]
    path = pathlib.Path(__file__).with_name("preferences_addition.jsonl")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
