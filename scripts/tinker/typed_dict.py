"""Lets modules take TypedDict from typing_extensions: typed_dict.py FOLDER."""
import pathlib
import re
import sys


def moved(found):
    names = [name.strip() for name in found.group(1).split(",")]
    if "TypedDict" not in names:
        return found.group(0)
    rest = [name for name in names if name and name != "TypedDict"]
    return "from typing_extensions import TypedDict\n" + (f"from typing import {', '.join(rest)}" if rest else "")


for path in pathlib.Path(sys.argv[1]).rglob("*.py"):
    text = path.read_text()
    if "TypedDict" in text:
        path.write_text(re.sub(r"^from typing import ([^(\n]*)$", moved, text, flags=re.M))
