#!/usr/bin/env python3
"""Writes sentences.txt: 400 plain sentences about animals that count, a line each, for training on raw text.

The same file every time: python3 pipelines/data/sentences.py
"""

import pathlib
import random

ANIMALS = ["cat", "dog", "hen", "fox", "owl", "cow", "mouse", "horse"]
PLACES = ["in the garden", "under the bridge", "on the roof", "by the river", "behind the house"]
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TIMES = ["in the morning", "at noon", "at night"]


def sentence(draw):
    animal, place, time, count = draw.choice(ANIMALS), draw.choice(PLACES), draw.choice(TIMES), draw.randint(2, 10)
    counted = ", ".join(NUMBERS[:count])
    return draw.choice(
        [
            f"{time} the {animal} sits {place} and counts to {NUMBERS[count - 1]}: {counted}.",
            f"the {animal} counts to {NUMBERS[count - 1]} {place}: {counted}.",
            f"who counts {place} {time}? it is the {animal}: {counted}.",
        ]
    )


def main():
    draw = random.Random(0)
    lines = [sentence(draw) for _ in range(400)]
    pathlib.Path(__file__).with_suffix(".txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
