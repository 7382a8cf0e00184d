"""Descriptions of Python functions as tools, from type hints and docstrings."""
import inspect
import re
import types
import typing

from .loading import Refused

BASIC = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", type(None): "null"}
UNIONS = tuple(kind for kind in (typing.Union, getattr(types, "UnionType", None)) if kind)


def describe(function):
    """Returns name, description and the JSON schema of the arguments of a function.

    The docstring is in Google's format: a description, then `Args:` with a line for each argument.
    The result equals `transformers.utils.get_json_schema` for what both take.
    """
    name = function.__name__
    purpose, explained = read_docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise Refused(f"tool {name}: a type hint can't be read: {error}")
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise Refused(f"tool {name} takes `{parameter}`; a tool's arguments have names")
        if parameter.name not in hints:
            raise Refused(f"tool {name}: its argument `{parameter.name}` has no type hint")
        schema = schema_of(hints[parameter.name], f"tool {name}: `{parameter.name}`")
        text = explained.get(parameter.name, "")
        # As transformers does: "(choices: [...])" at the end of a description lists the values.
        choices = re.search(r"\(choices:\s*(\[.*?\])\)\s*$", text)
        if choices:
            schema["enum"] = [part.strip().strip("'\"") for part in choices[1].strip("[]").split(",")]
            text = text[: choices.start()].strip()
        if text:
            schema["description"] = text
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"name": name, "description": purpose, "parameters": parameters}


def read_docstring(text):
    """Returns the description, and the explanation of each argument."""
    sections = re.split(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):[ \t]*$", text, flags=re.MULTILINE)
    explained = {}
    for title, body in zip(sections[1::2], sections[2::2]):
        if title not in ("Args", "Arguments", "Parameters"):
            continue
        name = None
        for line in inspect.cleandoc(body).splitlines():
            begins = re.match(r"(\w+)[ \t]*(?:\([^)]*\))?:[ \t]*(.*)", line)
            if begins:
                name = begins[1]
                explained[name] = begins[2].strip()
            elif name and line.strip():
                explained[name] = f"{explained[name]} {line.strip()}".strip()
    return sections[0].strip(), explained


def schema_of(hint, where):
    if hint in BASIC:
        return {"type": BASIC[hint]}
    if hint is typing.Any or hint is inspect.Parameter.empty:
        return {}
    if hint in (list, tuple, set):
        return {"type": "array"}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return schema_of(inner[0], where)
    if origin in UNIONS:
        return of_union(inner, where)
    if origin is typing.Literal:
        kinds = sorted({BASIC[type(value)] for value in inner})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin in (list, set, frozenset):
        return {"type": "array", "items": schema_of(inner[0], where)}
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return {"type": "array", "items": schema_of(inner[0], where)}
        return {"type": "array", "prefixItems": [schema_of(part, where) for part in inner]}
    if origin is dict:
        values = schema_of(inner[1], where)
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    raise Refused(f"{where} has the type {hint}; tools take str, int, float, bool, list, tuple, dict, Literal, Optional and unions of them")


def of_union(inner, where):
    nullable = type(None) in inner
    kinds = [schema_of(kind, where) for kind in inner if kind is not type(None)]
    if len(kinds) == 1:
        schema = kinds[0]
    elif all(set(kind) == {"type"} and isinstance(kind["type"], str) for kind in kinds):
        schema = {"type": sorted(kind["type"] for kind in kinds)}
    else:
        schema = {"anyOf": kinds}
    return {**schema, "nullable": True} if nullable else schema
