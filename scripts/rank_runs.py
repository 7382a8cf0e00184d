"""Recipe and runs of supervised training on arithmetic, for scripts that measure several ranks."""
import json
import subprocess
import sys
import time


def recipe(folder, model, rows):
    """Writes the recipe of a tiny model with these keys of `[model]` and `[sft]`. Returns its path."""
    path, text = f"{folder}/recipe.toml", 'pipeline = "sft"\n'
    for name, keys in {"model": {"kind": "tiny", **model}, "task": {"kind": "arithmetic"}, "sft": rows}.items():
        text += f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    with open(path, "w") as file:
        file.write(text)
    return path


def run(program, ranks, path, out, *sets, watch=lambda: None, every=0.005):
    """Runs a recipe to its end and calls `watch` every `every` seconds. If the run fails, the script ends with its log."""
    start = ["run"] if ranks == 1 else ["launch", "--ranks", str(ranks)]
    command = [program, *start, path, "--out", out, *(word for one in sets for word in ("--set", one))]
    with open(f"{out}.log", "w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            time.sleep(every)
            watch()
        if process.returncode:
            log.seek(0)
            sys.exit(f"{' '.join(command)}\n{log.read()}")
