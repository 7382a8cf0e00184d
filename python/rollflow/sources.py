"""Files with the source of functions and classes, for processes that load them."""
import ast
import builtins
import inspect
import linecache
import math
import os
import re
import symtable
import sys
import textwrap
import types


def files_of(targets, folder):
    """Returns for each target a file that defines it, and its name there.

    What a notebook or a prompt defines has no file: the source of all such targets, and of what they
    use, is written into one file in `folder`.
    """
    found = [path_of(target) for target in targets]
    missing = [target for target, path in zip(targets, found) if path is None]
    if missing:
        written = os.path.join(folder, f"{missing[0].__name__}.py")
        with open(written, "w", encoding="utf-8") as file:
            file.write(source_of(*missing))
        found = [path or written for path in found]
    return [(path, target.__qualname__) for path, target in zip(found, targets)]


def path_of(target):
    """Returns the file that defines a function or class; None if there is none."""
    name = getattr(target, "__qualname__", None)
    if name is None:
        raise ValueError(f"{target!r} is neither a function nor a class; give the class, from which each process makes its own")
    if "." in name or name == "<lambda>":
        raise ValueError(f"{name} is defined inside of another function; a run needs a name at the top of a file")
    # The file of a function, not that of a decorator around it.
    inner = inspect.unwrap(target)
    try:
        path = inspect.getsourcefile(inner)
    except (OSError, TypeError):
        # A class of a notebook.
        return None
    module = sys.modules.get(inner.__module__)
    if inner is not target and getattr(module, name, target) is not target:
        raise ValueError(f"{name} of {inner.__module__} is another function than the one given; decorate it there, or define one that calls it")
    return os.path.abspath(path) if path and os.path.exists(path) and not path.startswith("<") else None


def source_of(*targets):
    """Returns the source of functions and classes, with the imports, constants and definitions that they use."""
    parts, written, defined = [], set(), set()

    def define(target):
        if target in defined:
            return
        defined.add(target)
        text, values = text_of(target), values_of(target)
        own, used = names_in(text)
        written.update(own)
        for name in sorted(used - own):
            if name in values and name not in written and not is_given(name, values[name]):
                add(name, values[name], target)
        parts.append(text)

    def add(name, value, target):
        inner = inspect.unwrap(value) if callable(value) else value
        if isinstance(inner, (types.FunctionType, type)) and inner.__module__ == target.__module__:
            define(inner)
            line = None if name in written else f"{name} = {inner.__name__}\n"
        else:
            line = line_of(name, value, target.__module__)
            if line is None:
                kind = type(value).__name__
                raise ValueError(f"{target.__qualname__} uses {name}, a {kind}, which can't be written into a file; put both into one")
        written.add(name)
        parts.extend([line] if line else [])

    for target in targets:
        define(target)
    return "\n".join(parts)


def is_given(name, value):
    """Returns true for a name that Python or IPython defines everywhere. A user may give such a name to another value."""
    if not hasattr(builtins, name):
        return False
    # Where its code is: IPython's `open` has the names of Python's.
    origin = getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None)
    return name.startswith("__") or value is getattr(builtins, name) or str(origin).startswith("IPython.")


def line_of(name, value, here):
    """Returns a line that makes `name` the value; None if a line can't. `here` is no module for others."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}\n"
    origin = getattr(value, "__module__", None)
    # Python 3.9 keeps the names of `typing` in `_name`.
    there = next(filter(None, (getattr(value, key, None) for key in ("__qualname__", "__name__", "_name"))), None)
    if origin and origin != here and there and getattr(sys.modules.get(origin), there, None) is value:
        return f"from {origin} import {there} as {name}\n"
    if isinstance(value, re.Pattern):
        return f"import re\n{name} = re.compile({value.pattern!r}, {value.flags})\n"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name} = float({str(value)!r})\n"
    try:
        same = ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        return None
    return f"{name} = {value!r}\n" if type(same) is type(value) and same == value else None


def values_of(target):
    """Returns the global names that a function or class sees."""
    return vars(sys.modules[target.__module__]) if isinstance(target, type) else inspect.unwrap(target).__globals__


def text_of(target):
    """Returns the source of a function or class with its decorators. A cell of a notebook has lines and no file."""
    if not isinstance(target, type):
        return textwrap.dedent(inspect.getsource(target))
    members = [getattr(member, "__func__", getattr(member, "fget", member)) for member in vars(target).values()]
    files = {member.__code__.co_filename: None for member in members if isinstance(member, types.FunctionType)}
    # A class without methods is in the newest cell that has one of its name.
    cells = [file for file in reversed(list(linecache.cache)) if file.startswith("<") or not os.path.exists(file)]
    for file in [*files, *cells]:
        lines = linecache.getlines(file)
        found = [node for node in parsed("".join(lines)) if isinstance(node, ast.ClassDef) and node.name == target.__name__]
        if found:
            first = min(node.lineno for node in [found[-1], *found[-1].decorator_list])
            return "".join(lines[first - 1 : found[-1].end_lineno]).rstrip("\n") + "\n"
    try:
        return inspect.getsource(target)
    except (OSError, TypeError):
        raise ValueError(f"the source of {target.__qualname__} was not found; put it into a file") from None


def parsed(text):
    """Returns the statements of a cell; none of one that only a notebook reads."""
    try:
        return ast.parse(text).body
    except SyntaxError:
        return []


def names_in(text):
    """Returns the names that a piece of source defines at its top, and the global names that it uses."""
    table = symtable.symtable(text, "<source>", "exec")

    def used(table):
        own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        return own.union(*(used(child) for child in table.get_children()))

    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned()}, used(table)
