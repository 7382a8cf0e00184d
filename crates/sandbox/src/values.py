# The first half of the tests' process (tests.py has the second): values of the answer's as they arrive, and values of the tests' as they leave.
# Nothing that the answer sends is executed here.
import builtins, io, sys, time

try:  # What the names below stand for, in a third of the time: such a process starts for every job where none may be forked.
    import posix as os, _signal as signal
    from _json import make_scanner
except ImportError:
    import os, signal
    from json.scanner import py_make_scanner as make_scanner

IDLE = 20  # seconds without a job, after which this process ends
ONLY_SYNTAX = 0x400  # ast.PyCF_ONLY_AST
BUILTINS = {name: value for name, value in vars(builtins).items() if not name.startswith("_")}
ERRORS = {name: kind for name, kind in BUILTINS.items() if isinstance(kind, type) and issubclass(kind, BaseException)}


class Failed(BaseException):
    """The test has failed, whatever its code makes of this."""


def fail(why):
    wire.failed = wire.failed or why
    raise Failed(why)


# ---- values that arrive


class Json:
    """How JSON is read, as `json.JSONDecoder` has it."""

    strict, memo, object_hook, object_pairs_hook = True, {}, None, None
    parse_float, parse_int, parse_constant = float, int, float


def read(line):
    try:
        return make_scanner(Json)(line.decode(), 0)[0]
    except StopIteration:
        raise ValueError("no JSON")


def array(kind, shape, data):
    import numpy

    return numpy.frombuffer(data, numpy.dtype(kind)).reshape(shape).copy()


def of_library(name):
    if name in ("range", "array", "defaultdict"):
        return {"range": range, "array": array, "defaultdict": dict}[name]
    if name in ("Counter", "OrderedDict", "deque"):
        return getattr(__import__("collections"), name)
    if name in ("date", "time", "datetime"):
        return getattr(__import__("datetime"), name).fromisoformat
    module = {"Decimal": "decimal", "Fraction": "fractions", "timedelta": "datetime"}[name]
    return getattr(__import__(module), name)


def value_of(data):
    if type(data) is not list:
        return data
    tag, *rest = data
    if tag in ("list", "tuple", "set", "frozenset"):
        return BUILTINS[tag]([value_of(each) for each in rest[0]])
    if tag == "dict":
        parts = [value_of(each) for each in rest[0]]
        return dict(zip(parts[::2], parts[1::2]))
    if tag == "str":
        return bytes.fromhex(rest[0]).decode("utf-8", "surrogatepass")
    if tag == "int":
        return int(rest[0], 16)
    if tag == "float":
        return float(rest[0])
    if tag == "complex":
        return complex(*[value_of(each) for each in rest])
    if tag in ("bytes", "bytearray"):
        return BUILTINS[tag].fromhex(rest[0])
    if tag == "named":
        name, fields, values = [value_of(["list", each]) if type(each) is list else each for each in rest]
        import collections

        return collections.namedtuple(name, fields)(*values)
    if tag == "new":
        return of_library(rest[0])(*[value_of(each) for each in rest[1]])
    if tag == "theirs":
        at, kind = rest
        at = int(at)
        if kind == "async":

            async def wait(*arguments, **named):
                return ask("await", ask("call", Remote(at), *arguments, **named))

            return wait
        return Callable(at) if kind == "call" else Remote(at)
    if tag == "yours":
        return wire.given[int(rest[0])]
    if tag == "error":
        return error_class([value_of(each) for each in rest[0]])
    if tag == "module":
        if rest[0].partition(".")[0] in ("__main__", "builtins"):
            raise ValueError("no module of a test's")
        return __import__(rest[0], fromlist=["*"])
    raise ValueError("an unknown tag")


def error_class(chain):
    """A class of our own for an exception of the answer's, with the same ancestors."""
    if len(chain) == 1:
        return ERRORS[chain[0]]
    at, name, *others = chain
    if at not in wire.errors:
        told = {"__str__": lambda self: getattr(self, "told", "")}
        wire.errors[at] = type(name, (error_class(others),), told)
    return wire.errors[at]


# ---- values that leave, as Python expressions


def source(value, depth=0):
    kind = type(value)
    if value is None or kind in (bool, str, bytes):
        return repr(value)
    if kind is int:
        return hex(value)
    if kind is float:
        return repr(value)
    if kind is complex:
        return "new('builtins','complex',%r,%r)" % (value.real, value.imag)
    if isinstance(value, Remote):
        return "mine(%d)" % number_of(value)
    if depth > 90:
        raise ValueError("a test hands over a value that is nested more than 90 deep")
    inner = lambda values: ",".join(source(each, depth + 1) for each in values)
    if kind is list:
        return "[%s]" % inner(value)
    if kind is tuple:
        return "(%s,)" % inner(value) if value else "()"
    if kind is dict:
        return "{%s}" % ",".join("%s:%s" % (source(key, depth + 1), source(each, depth + 1)) for key, each in value.items())
    if kind in (set, frozenset, bytearray):
        return "new('builtins','%s',[%s])" % (kind.__name__, inner(value))
    if kind is range:
        return "new('builtins','range',%d,%d,%d)" % (value.start, value.stop, value.step)
    name = "%s.%s" % (kind.__module__, kind.__name__)
    if name in ("collections.Counter", "collections.OrderedDict"):
        return "new('collections','%s',%s)" % (kind.__name__, source(dict(value), depth + 1))
    if name == "collections.defaultdict":
        return "new('collections','defaultdict',%s,%s)" % (source(value.default_factory), source(dict(value), depth + 1))
    if name == "collections.deque":
        return "new('collections','deque',[%s],%s)" % (inner(value), source(value.maxlen))
    if name == "decimal.Decimal":
        return "new('decimal','Decimal',%r)" % str(value)
    if name == "fractions.Fraction":
        return "new('fractions','Fraction',%s,%s)" % (source(value.numerator), source(value.denominator))
    if name in ("datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta"):
        return "new('datetime','%s',%s)" % (kind.__name__, inner(value.__reduce__()[1]))
    if kind is io.StringIO:
        return "new('io','StringIO',%r)" % value.getvalue()
    if name == "numpy.ndarray":
        return "new('numpy','array',%s)" % source(value.tolist(), depth + 1)
    if isinstance(value, type) and BUILTINS.get(value.__name__) is value:
        return "builtin(%r)" % value.__name__
    for at, known in wire.errors.items():
        if known is value:
            return "mine(%d)" % at
    if isinstance(value, tuple):
        return source(tuple(value), depth)
    if isinstance(value, (int, float, str)) and not callable(value):
        return source({int: int, float: float, str: str}[next(b for b in (int, float, str) if isinstance(value, b))](value), depth)
    if callable(value) and not isinstance(value, type):
        wire.given.append(value)
        return "theirs(%d)" % (len(wire.given) - 1)
    if hasattr(value, "__next__") or kind.__name__ in ("dict_keys", "dict_values", "dict_items"):
        return "iter([%s])" % inner(value) if hasattr(value, "__next__") else source(list(value), depth)
    raise TypeError("a test can't hand a %s to an answer: plain data, functions and the answer's own objects can be" % kind.__name__)
