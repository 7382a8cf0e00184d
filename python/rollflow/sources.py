"""Files with the source of functions and classes, for processes that load them."""
import ast
import builtins
import inspect
import linecache
import os
import textwrap
import types


def file_of(target, folder):
    """Returns a file that defines `target`, and its name there.

    What a notebook or a prompt defines has no file: its source, and that of what it uses, is
    written into `folder`.
    """
    name = target.__qualname__
    if "." in name or name == "<lambda>":
        raise ValueError(f"{name} is defined inside of another function; a run needs a name at the top of a file")
    path = inspect.getsourcefile(target)
    if path and os.path.exists(path) and not path.startswith("<"):
        return os.path.abspath(path), name
    path = os.path.join(folder, f"{name}.py")
    with open(path, "w") as file:
        file.write(source_of(target))
    return path, name


def source_of(target):
    """Returns the source of a function or class, with the imports, constants and definitions that it uses."""
    before, written = [], set()

    def add(target):
        for name in sorted(names_in(target)):
            values = vars(inspect.getmodule(target) or __import__("__main__"))
            if name in written or name not in values or hasattr(builtins, name):
                continue
            written.add(name)
            value = values[name]
            if isinstance(value, types.ModuleType):
                before.append(f"import {value.__name__} as {name}\n")
            elif isinstance(value, (types.FunctionType, type)) and value.__module__ == target.__module__:
                add(value)
                before.append(text_of(value))
            elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
                before.append(f"from {value.__module__} import {value.__qualname__} as {name}\n")
            elif isinstance(value, (int, float, str, bytes, bool, type(None), list, tuple, dict, set)):
                before.append(f"{name} = {value!r}\n")
            else:
                raise ValueError(f"{target.__qualname__} uses {name}, a {type(value).__name__}, which can't be written into a file; put both into one")

    written.add(target.__name__)
    add(target)
    return "\n".join([*before, text_of(target)])


def text_of(target):
    """Returns the source of a function or class. A cell of a notebook has lines and no file."""
    if not isinstance(target, type):
        return textwrap.dedent(inspect.getsource(target))
    methods = [member for member in vars(target).values() if isinstance(member, types.FunctionType)]
    if not methods:
        return inspect.getsource(target)
    text = "".join(linecache.getlines(methods[0].__code__.co_filename))
    found = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == target.__name__]
    if not found:
        raise ValueError(f"the source of {target.__qualname__} was not found; put it into a file")
    return ast.get_source_segment(text, found[-1]) + "\n"


def names_in(target):
    """Returns the global names that a function, or the methods of a class, use."""
    if isinstance(target, type):
        members = [member for member in vars(target).values() if isinstance(member, types.FunctionType)]
        return {name for member in members for name in names_in(member)} | {base.__name__ for base in target.__bases__}

    def in_code(code):
        inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        return set(code.co_names).union(*(in_code(one) for one in inner))

    hints = {hint for hint in getattr(target, "__annotations__", {}).values()}
    return in_code(target.__code__) | {getattr(hint, "__name__", str(hint)) for hint in hints}
