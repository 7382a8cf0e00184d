#!/usr/bin/env python3
"""Writes word_problems.jsonl: 200 word problems with worked answers that end in `#### number`, in the form of GSM8K.

The same file every time: python3 pipelines/data/word_problems.py
"""

import json
import pathlib
import random

NAMES = ["Ada", "Ben", "Chloe", "Dev", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jun", "Kira", "Leo", "Mina", "Noor", "Omar", "Pia"]
THINGS = ["apples", "marbles", "stickers", "pencils", "shells", "stamps", "buttons", "cards"]


def shopping(draw):
    name = draw.choice(NAMES)
    thing, count, price, change = draw.choice(THINGS), draw.randint(3, 12), draw.randint(2, 9), draw.randint(1, 20)
    cost = count * price
    return (
        f"{name} buys {count} {thing} at {price} dollars each and pays with {cost + change} dollars. How many dollars of change does {name} "
        "get?",
        [f"The {thing} cost {count} * {price} = {cost} dollars.", f"The change is {cost + change} - {cost} = {change} dollars."],
        change,
    )


def sharing(draw):
    name = draw.choice(NAMES)
    thing, friends, each, left = draw.choice(THINGS), draw.randint(3, 9), draw.randint(2, 12), draw.randint(1, 8)
    total = friends * each + left
    return (
        f"{name} has {total} {thing}. {name} gives {each} {thing} to each of {friends} friends. How many {thing} does {name} have left?",
        [f"The friends get {friends} * {each} = {friends * each} {thing}.", f"{name} has {total} - {friends * each} = {left} {thing} left."],
        left,
    )


def saving(draw):
    name = draw.choice(NAMES)
    weeks, a_week, spent = draw.randint(4, 15), draw.randint(5, 25), draw.randint(3, 19)
    saved = weeks * a_week
    return (
        f"{name} saves {a_week} dollars every week for {weeks} weeks and then spends {spent} dollars on a book. How much money is left?",
        [f"{name} saves {weeks} * {a_week} = {saved} dollars.", f"After the book {saved} - {spent} = {saved - spent} dollars are left."],
        saved - spent,
    )


def travelling(draw):
    name = draw.choice(NAMES)
    speed, hours, rest = draw.randint(8, 60), draw.randint(2, 6), draw.randint(5, 40)
    distance = speed * hours
    return (
        f"{name} rides at {speed} kilometres an hour for {hours} hours and then walks the last {rest} kilometres. How long is the whole way "
        "in kilometres?",
        [f"{name} rides {speed} * {hours} = {distance} kilometres.", f"The whole way is {distance} + {rest} = {distance + rest} kilometres."],
        distance + rest,
    )


def baking(draw):
    name = draw.choice(NAMES)
    trays, on_each, burnt, boxes = draw.randint(2, 8), 12, draw.randint(0, 3) * 6, draw.choice([2, 3, 6])
    good = trays * on_each - burnt
    return (
        f"{name} bakes {trays} trays of {on_each} biscuits. {burnt} of them burn, and the others go evenly into {boxes} boxes. How many "
        "biscuits are in a box?",
        [
            f"There are {trays} * {on_each} = {trays * on_each} biscuits.",
            f"{trays * on_each} - {burnt} = {good} are good.",
            f"Each box gets {good} / {boxes} = {good // boxes} biscuits.",
        ],
        good // boxes,
    )


def ages(draw):
    one, other = draw.sample(NAMES, 2)
    age, times, years = draw.randint(3, 12), draw.randint(2, 5), draw.randint(2, 15)
    older = age * times
    return (
        f"{one} is {age} years old. {other} is {times} times as old. How old will {other} be in {years} years?",
        [f"{other} is {age} * {times} = {older} years old.", f"In {years} years {other} will be {older} + {years} = {older + years}."],
        older + years,
    )


def main():
    draw = random.Random(20)
    kinds = [shopping, sharing, saving, travelling, baking, ages]
    lines, seen = [], set()
    while len(lines) < 200:
        question, steps, answer = kinds[len(lines) % len(kinds)](draw)
        if question not in seen:
            seen.add(question)
            lines.append(json.dumps({"question": question, "answer": "\n".join([*steps, f"#### {answer}"])}))
    path = pathlib.Path(__file__).with_suffix(".jsonl")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
