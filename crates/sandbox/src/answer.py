# Runs an answer (code that a model wrote) and does what the tests' process asks of it: one request a line, one reply a line. Expected values
# and verdicts are never in this process. A reply is no more than a claim about a value, an exception or an output.


def serve():
    import builtins, io, sys

    try:  # What these names stand for, without the time that importing `os` and `signal` takes.
        import posix as os, _signal as signal
    except ImportError:
        import os, signal

    # Requests and replies have descriptors of their own: what else reads standard input finds it empty, what else prints goes to stderr.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = io.StringIO()
    answer = type(sys)("answer")
    sys.modules["answer"] = answer
    objects, numbers, buffered = [], {}, [b""]

    class Late(BaseException):
        pass

    class Unsayable(BaseException):
        """A result that can't be given as plain data."""

    def late(*_):
        raise Late()

    signal.signal(signal.SIGALRM, late)

    # ---- lines

    def receive():
        while b"\n" not in buffered[0]:
            more = os.read(requests, 1 << 16)
            if not more:
                os._exit(0)
            buffered[0] += more
        line, buffered[0] = buffered[0].split(b"\n", 1)
        return eval(line, names)

    def send(text):
        data = text.encode() + b"\n"
        while data:
            data = data[os.write(replies, data) :]

    def printed():
        text = sys.stdout.getvalue() if type(sys.stdout) is io.StringIO else ""
        if text:
            sys.stdout.seek(0)
            sys.stdout.truncate()
        return string(text)

    # ---- values as JSON

    def string(text):
        if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
            return '"' + text + '"'
        return '["str","%s"]' % text.encode("utf-8", "surrogatepass").hex()

    def number(value):
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    def row(values, depth):
        return "[" + ",".join([plain(value, depth + 1) for value in values]) + "]"

    def made(name, *arguments, depth):
        return '["new","%s",%s]' % (name, row(arguments, depth))

    def plain(value, depth=0):
        kind = type(value)
        if value is None or kind is bool:
            return {None: "null", True: "true", False: "false"}[value]
        if depth > 90:
            raise ValueError("a value that is nested more than 90 deep")
        if not hasattr(kind, "__members__"):
            for base in (int, float, str, bytes, complex):
                if isinstance(value, base):
                    return scalar(base, value)
        if kind in (list, tuple, set, frozenset):
            return '["%s",%s]' % (kind.__name__, row(value, depth))
        if kind is dict:
            return '["dict",%s]' % row([part for pair in value.items() for part in pair], depth)
        return library(value, kind, depth) or handle(value, kind)

    def scalar(base, value):
        if base is int:
            value = int.__index__(value)
            return "%d" % value if -(1 << 62) < value < 1 << 62 else '["int","%x"]' % value
        if base is float:
            text = float.__repr__(value)
            return '["float","%s"]' % text if text[-1] in "nf" else text
        if base is str:
            return string(str.__str__(value))
        if base is bytes:
            return '["bytes","%s"]' % bytes.hex(value)
        return '["complex",%s,%s]' % (scalar(float, value.real), scalar(float, value.imag))

    def library(value, kind, depth):
        name = "%s.%s" % (kind.__module__, kind.__name__)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return '["named",%s,%s,%s]' % (string(kind.__name__), row(kind._fields, depth), row(tuple.__iter__(value), depth))
        if kind is bytearray:
            return '["bytearray","%s"]' % value.hex()
        if kind is range:
            return made("range", value.start, value.stop, value.step, depth=depth)
        if name in ("collections.Counter", "collections.OrderedDict", "collections.defaultdict"):
            return made(kind.__name__, dict(value), depth=depth)
        if name == "collections.deque":
            return made("deque", list(value), value.maxlen, depth=depth)
        if name == "decimal.Decimal":
            return made("Decimal", str(value), depth=depth)
        if name == "fractions.Fraction":
            return made("Fraction", value.numerator, value.denominator, depth=depth)
        if name in ("datetime.date", "datetime.time", "datetime.datetime"):
            return made(kind.__name__, value.isoformat(), depth=depth)
        if name == "datetime.timedelta":
            return made("timedelta", value.days, value.seconds, value.microseconds, depth=depth)
        if kind.__module__.partition(".")[0] == "numpy":
            numpy = sys.modules["numpy"]
            if isinstance(value, numpy.generic):
                return plain(value.item(), depth)
            if kind is numpy.ndarray and value.dtype.kind in "biufc":
                return made("array", value.dtype.str, list(value.shape), value.tobytes(), depth=depth)

    def ancestry(kind):
        """An exception's classes, up to one that Python has."""
        chain = []
        for base in kind.__mro__:
            if base.__module__ == "builtins":
                return row(chain + [base.__name__], 0)
            chain += [number(base), base.__name__]

    def handle(value, kind):
        if kind is Theirs:
            return '["yours",%d]' % value.number
        if kind is type(sys):
            return '["module",%s]' % string(value.__name__)
        if isinstance(value, type) and issubclass(value, BaseException):
            return '["error",%s]' % ancestry(value)
        waits = kind.__name__ in ("function", "method") and value.__code__.co_flags & 0x80
        known_as = "async" if waits else "call" if callable(value) else "object"
        return '["theirs",%d,"%s"]' % (number(value), known_as)

    # ---- what is asked

    class Theirs:
        """A function of the tests, which can be called and nothing else."""

        def __init__(self, number):
            self.number = number

        def __call__(self, /, *arguments, **named):
            send('["call",%d,%s,%s]' % (self.number, plain(arguments), plain(named)))
            return receive()()

    def given(value):
        return lambda: value

    def thrown(error):
        def throw():
            raise error

        return throw

    def load(code):
        exec(compile(code, "answer", "exec"), answer.__dict__)

    def awaited(what):
        import asyncio

        async def wait():
            return await what

        return asyncio.run(wait())

    def content(value):
        for base in (int, float, str, bytes, list, tuple, dict, set, frozenset):
            if isinstance(value, base):
                return [base.__index__(value) if base is int else base(value)]
        return []

    def carry_out(act, arguments, named):
        # What is handed over is a copy: what becomes of it goes back.
        mutable = [(at, each) for at, each in [*enumerate(arguments), *named.items()] if type(each) in (list, dict, set, bytearray)]
        before = [plain(each) for _, each in mutable]
        value = act(*arguments, **named)
        try:
            value = plain(value)
            after = [plain(each) for _, each in mutable]
        except Exception as error:
            raise Unsayable(type(error).__name__ + ": " + str(error)[:200])
        changed = ["[%s,%s]" % (plain(at), now) for (at, _), was, now in zip(mutable, before, after) if was != now]
        return '["value",%s,[%s],%s]' % (value, ",".join(changed), printed())

    acts = {
        "load": load,
        "await": awaited,
        "content": content,
        "call": lambda function, /, *arguments, **named: function(*arguments, **named),
        "enter": lambda value: type(value).__enter__(value),
        "exit": lambda value: type(value).__exit__(value, None, None, None),
        "put": lambda value, key, item: value.__setitem__(key, item),
        "take": lambda value, key: value.__delitem__(key),
        "item": lambda value, key: value[key],
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "truediv": lambda a, b: a / b,
        "eq": lambda a, b: bool(a == b),
        "lt": lambda a, b: bool(a < b),
        "le": lambda a, b: bool(a <= b),
    }
    for name in "len iter next bool str repr int float abs getattr setattr delattr isinstance".split():
        acts[name] = getattr(builtins, name)
    names = {
        "theirs": Theirs,
        "mine": objects.__getitem__,
        "given": given,
        "thrown": thrown,
        "builtin": lambda name: getattr(builtins, name),
        "new": lambda module, name, *arguments: getattr(__import__(module), name)(*arguments),
        "nan": float("nan"),
        "inf": float("inf"),
    }

    while True:
        act, seconds, arguments, named = receive()
        if act == "name" and arguments[0] not in answer.__dict__:
            send('["none"]')
            continue
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            if act == "name":
                reply = '["value",%s,[],""]' % plain(answer.__dict__[arguments[0]])
            else:
                reply = carry_out(acts[act], arguments, named)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Late:
            reply = '["late"]'
        except Unsayable as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            reply = '["unsayable",%s]' % string(str(error))
        except BaseException as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            try:
                reply = '["raise",%s,%s,%s,%s]' % (ancestry(type(error)), plain(error.args), string(str(error)[:1000]), printed())
            except MemoryError:
                reply = '["unsayable","an exception that does not fit into memory"]'
            except BaseException as another:
                reply = '["raise",%s,["tuple",[]],"",""]' % ancestry(type(another))
        send(reply)


serve()
