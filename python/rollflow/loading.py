"""Finds what a user named in a Python file, and calls it."""
import asyncio
import functools
import importlib
import importlib.util
import inspect
import json
import os
import queue
import sys
import threading
import traceback

HERE = os.path.dirname(os.path.abspath(__file__)) if "__file__" in globals() else "rollflow"
SHOWN = 8000


class Refused(Exception):
    """An error whose text is for the user, without a traceback."""


def load(where, name):
    """Returns attribute `name` of a file, or of a module that Python finds by its name."""
    if not where.endswith(".py"):
        return attribute(importlib.import_module(where), where, name)
    path = os.path.abspath(where)
    if not os.path.exists(path):
        raise Refused(f"there is no file {path}")
    folder, stem = os.path.dirname(path), os.path.splitext(os.path.basename(path))[0]
    # As `python file.py` does, so that the file can import its neighbours.
    if folder not in sys.path:
        sys.path.insert(0, folder)
    loaded = sys.modules.get(stem)
    if loaded is not None and getattr(loaded, "__file__", None) == path:
        return attribute(loaded, where, name)
    # A file may have the name of a module that is in use, such as `math`.
    stem = stem if loaded is None else f"{stem}_of_run"
    spec = importlib.util.spec_from_file_location(stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    return attribute(module, where, name)


def attribute(module, where, name):
    if hasattr(module, name):
        return getattr(module, name)
    own = [key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", None) == module.__name__]
    raise Refused(f"{where} has no `{name}`; it defines {', '.join(sorted(own)) or 'no function or class'}")


def parameters(function):
    """Returns the names of the parameters that can be given by name, those without a default, and whether it takes any name."""
    found = inspect.signature(function).parameters.values()
    named = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return (
        {p.name for p in named},
        [p.name for p in named if p.default is p.empty],
        any(p.kind == p.VAR_KEYWORD for p in found),
    )


def fitting(function, values):
    """Returns those of `values` that `function` takes by name."""
    names, _, takes_all = parameters(function)
    return values if takes_all else {name: value for name, value in values.items() if name in names}


def is_async(function):
    if inspect.isclass(function):
        return False
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))


async def call(function, *args, **kwargs):
    """Calls a function, async or not. One that is not async runs in the main thread if `serve` waits there."""
    made = functools.partial(function, *args, **kwargs)
    if CALLS is None or is_async(function):
        result = made()
    else:
        loop = asyncio.get_running_loop()
        outcome = loop.create_future()
        CALLS.put((made, functools.partial(loop.call_soon_threadsafe, settle, outcome)))
        result, error = await outcome
        if error is not None:
            raise error
    return await result if inspect.isawaitable(result) else result


def settle(outcome, ended):
    if not outcome.done():
        outcome.set_result(ended)


def serve(loop, is_async):
    """Runs an event loop without end. `is_async`: if true, all functions of the user are async.

    Otherwise the loop runs in another thread, and this one calls the functions that are not async: they may
    use `asyncio.run` and signals.
    """
    global CALLS
    if is_async:
        return loop.run_forever()
    CALLS = queue.SimpleQueue()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    while True:
        made, answer = CALLS.get()
        try:
            ended = made(), None
        except ERRORS as error:
            ended = None, error
        answer(ended)


def as_json(answer):
    """Returns an answer as JSON that every reader accepts, with question marks for lone surrogates."""
    return json.dumps(answer, allow_nan=False, ensure_ascii=False, default=plain).encode("utf-8", "replace")


def plain(value):
    """Returns a value of NumPy or PyTorch as one of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"an answer holds a value of type {type(value).__name__}, which JSON does not have")


def explain(error):
    """Returns the traceback of an error without this package's own lines, at most `SHOWN` characters of its end."""
    if isinstance(error, Refused):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_ours(frame.filename)]
    lines = traceback.format_list(own) + traceback.format_exception_only(type(error), error)
    text = "".join(lines).rstrip()
    return text if len(text) <= SHOWN else "…" + text[-SHOWN:]


def is_ours(filename):
    return filename.startswith("<rollflow") or filename.startswith("<frozen") or os.path.dirname(filename) == HERE


ERRORS = (Exception, SystemExit, asyncio.CancelledError)
# Calls that the main thread makes in `serve`; None: they are made where the event loop runs.
CALLS = None
