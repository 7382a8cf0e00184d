# Runs tests against an answer that lives in another process. Names that a test does not define itself are the answer's: their values arrive
# as plain data and become exact objects of Python's own types, whose equality is Python's. Functions, classes and objects of the answer's own
# stay where they are, and are asked for one thing at a time. Nothing that the answer sends is executed here.
#
# Standard input has a word that answers don't know, then jobs, which begin with that word, and the answer's replies. Standard output has requests
# ("c"), verdicts ("v") and the end of a job ("n").
# values.py comes before this file.

# ---- the answer's functions, classes and objects


class Remote:
    """An object of the answer's, which stays there. It never hears what it is compared with, unless that is the answer's, too."""

    def __init__(self, at):
        object.__setattr__(self, "_at", at)

    def __eq__(self, other):
        if isinstance(other, Remote):
            return number_of(self) == number_of(other) or ask("eq", self, other) is True
        if isinstance(other, (type(None), type)):
            return False
        # What it holds as one of Python's own types, if it is one: compared here.
        held = ask("content", self)
        return bool(held) and type(held) is list and not isinstance(held[0], Remote) and held[0] == other

    def __hash__(self):
        return hash(number_of(self))

    def __getattr__(self, name):
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__", "__annotations__"):
            raise AttributeError(name)
        return ask("getattr", self, name)

    def __setattr__(self, name, value):
        ask("setattr", self, name, value)

    def __delattr__(self, name):
        ask("delattr", self, name)

    def __getitem__(self, key):
        return ask("item", self, key)

    def __setitem__(self, key, value):
        ask("put", self, key, value)

    def __delitem__(self, key):
        ask("take", self, key)

    def __len__(self):
        return ask("len", self)

    def __bool__(self):
        return ask("bool", self) is True

    def __iter__(self):
        found = ask("iter", self)
        return found if isinstance(found, Remote) else iter(found)

    def __next__(self):
        return ask("next", self)

    def __str__(self):
        return ask("str", self)

    def __repr__(self):
        return ask("repr", self)

    def __int__(self):
        return ask("int", self)

    def __float__(self):
        return ask("float", self)

    def __abs__(self):
        return ask("abs", self)

    def __enter__(self):
        return ask("enter", self)

    def __exit__(self, *_):
        ask("exit", self)

    def __await__(self):
        return ask("await", self)
        yield

    def __instancecheck__(self, value):
        return isinstance(value, Remote) and ask("isinstance", value, self) is True


def between(act):
    """An operation on two of the answer's objects. With anything else it would show the answer what is expected of it."""

    def operate(self, other):
        return ask(act, self, other) if isinstance(other, Remote) else NotImplemented

    return operate


for act in ("add", "sub", "mul", "truediv", "lt", "le"):
    setattr(Remote, "__%s__" % act, between(act))


class Callable(Remote):
    def __call__(self, /, *arguments, **named):
        return ask("call", self, *arguments, **named)


def number_of(remote):
    return object.__getattribute__(remote, "_at")


# ---- asking


class Wire:
    def __init__(self, lines, out):
        self.lines, self.out = lines, out
        self.waiting, self.lost, self.failed, self.deadline = False, None, None, 0.0
        self.given, self.errors = [], {}

    def send(self, text):
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        while data:
            data = data[os.write(self.out, data) :]

    def reply(self):
        line = self.lines.readline()
        if line[:1] in (b"", b"!"):
            self.lost = line[1:].decode("utf-8", "replace").strip() or "the answer is gone"
            fail(self.lost)
        try:
            return read(line)
        except (ValueError, RecursionError, MemoryError):
            self.lost = "what the answer sent can't be read"
            fail(self.lost)

    def request(self, text):
        if self.lost:
            fail(self.lost)
        self.waiting = True
        self.send("c" + text)
        while True:
            reply = self.reply()
            if type(reply) is list and reply[:1] == ["call"]:
                self.send("c" + self.call_back(*reply[1:]))
                continue
            self.waiting = False
            return reply

    def call_back(self, at, arguments, named):
        """A function of the test's, which was handed to the answer."""
        try:
            return "given(%s)" % source(self.given[int(at)](*value_of(arguments), **value_of(named)))
        except Exception as error:
            name = type(error).__name__
            name = name if name in ERRORS else "RuntimeError"
            return "thrown(builtin(%r)(%r))" % (name, str(error))


def take_back(argument, now):
    """What the answer made of a list, dictionary or set that it was given."""
    if type(argument) is list and type(now) is list or type(argument) is bytearray and type(now) is bytearray:
        argument[:] = now
    elif type(argument) in (dict, set) and type(now) is type(argument):
        argument.clear()
        argument.update(now)


def ask(act, /, *arguments, **named):
    left = max(wire.deadline - time.monotonic(), 0.01)
    reply = wire.request("(%r,%f,%s,%s)" % (act, left, source(arguments), source(named)))
    try:
        kind, *parts = reply
        if kind == "value":
            value, changed, printed = parts
            value = value_of(value)
            for at, now in changed:
                take_back(arguments[at] if type(at) is int else named[value_of(at)], value_of(now))
            sys.stdout.write(value_of(printed))
            return value
        if kind == "raise":
            error = error_of(act, *parts)
        elif kind == "none":
            error = KeyError(arguments[0])
        elif kind == "late":
            error = Failed("TimeoutError: it took too long")
        elif kind == "unsayable":
            error = Failed("a result is no plain data: %s" % value_of(parts[0]))
        else:
            error = Failed("what the answer sent can't be read")
    except Exception as unreadable:
        error = Failed("what the answer sent can't be read: %s" % unreadable)
    if isinstance(error, Failed):
        fail(str(error))
    raise error


def error_of(act, chain, arguments, told, printed):
    sys.stdout.write(value_of(printed))
    kind = error_class([value_of(each) for each in chain])
    # It would end a loop of the test's, as if there were no more to test.
    if issubclass(kind, (StopIteration, StopAsyncIteration, GeneratorExit)) and act != "next":
        return RuntimeError("the answer raised " + kind.__name__)
    error = kind.__new__(kind)
    error.args = tuple(value_of(arguments))
    if kind not in ERRORS.values():
        error.told = str(value_of(told))
    return error


# ---- tests


class Scope(dict):
    """A test's names, and behind them the answer's."""

    def __missing__(self, name):
        if name in BUILTINS and not self.answers_builtins:
            raise KeyError(name)
        value = ask("name", name)
        if isinstance(value, Callable):
            self[name] = value
        return value


def names_only_builtins(code):
    """Whether a test knows no other names than Python's: then one of those must be what it tests."""
    used, own, left = set(), set(), [compile(code, "test", "exec", ONLY_SYNTAX)]
    while left:
        node = left.pop()
        for field in node._fields:
            inner = getattr(node, field, None)
            left += [each for each in (inner if isinstance(inner, list) else [inner]) if hasattr(each, "_fields")]
        kind = type(node).__name__
        if kind == "Name":
            (used if type(node.ctx).__name__ == "Load" else own).add(node.id)
        elif kind == "arg":
            own.add(node.arg)
        elif kind in ("FunctionDef", "AsyncFunctionDef", "ClassDef"):
            own.add(node.name)
        elif kind == "alias":
            own.add((node.asname or node.name).partition(".")[0])
    return used - own <= set(BUILTINS)


def lists(value):
    """JSON has no tuples."""
    if type(value) in (list, tuple):
        return [lists(each) for each in value]
    return {key: lists(each) for key, each in value.items()} if type(value) is dict else value


def run(test):
    scope = Scope(__name__="test", __builtins__=builtins)
    if type(test) is str:
        scope.answers_builtins = names_only_builtins(test)
        exec(compile(test, "test", "exec"), scope)
        return
    name, arguments, expected = test
    scope.answers_builtins = True
    try:
        function = scope[name]
    except KeyError:
        function = getattr(scope["Solution"](), name)
    result = lists(function(*arguments))
    # Some data sets put every expected value into a list of its own.
    alone = type(expected) is list and len(expected) == 1 and result == expected[0]
    assert result == expected or alone, "it gave %.100r instead of %.100r" % (result, expected)


def judged(act, seconds):
    wire.failed = None
    wire.deadline = time.monotonic() + seconds
    try:
        # The answer's own clock is first, and leaves it alive for other tests.
        signal.setitimer(signal.ITIMER_REAL, seconds * 1.5 + 0.5)
        act()
        said = "passed"
    except BaseException as error:
        said = (type(error).__name__ + ": " + str(error)).split("\n")[0][:200]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return wire.failed or said


def late(*_):
    if wire.waiting:
        wire.lost = "TimeoutError: it took too long, and did not come back"
    fail("TimeoutError: it took too long")


def serve(job):
    seconds, code, tests = read(job)
    end = time.monotonic() + seconds
    share = seconds / 2 / (len(tests) + 2)
    signal.signal(signal.SIGALRM, late)
    sys.stdout = io.StringIO()
    wrong = judged(lambda: ask("load", code), seconds / 2)
    for at, test in enumerate(tests):
        # A test that hangs takes half of what the shares of later ones leave, the last one all.
        later = len(tests) - at - 1
        most = (end - time.monotonic() - share * later) / (2 if later else 1)
        said = judged(lambda: run(test), max(share, most)) if wrong == "passed" else wrong
        wire.send("v%d %s" % (at, " ".join(said.split())))


def main():
    global wire
    wire = Wire(open(os.dup(0), "rb"), os.dup(1))
    sys.path[:] = [place for place in sys.path if place]
    nothing = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    secret = wire.lines.readline().strip()
    while True:
        signal.setitimer(signal.ITIMER_REAL, IDLE)  # ends the process
        job = wire.lines.readline()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not job:
            return
        if not job.startswith(secret):
            continue  # a reply that came too late
        job = job[len(secret) :]
        # Each job has a process of its own, and finds nothing that another one left. Where none may be started, this one serves one job.
        try:
            child = os.fork()
        except OSError:
            return serve(job)
        if child == 0:
            try:
                serve(job)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        wire.send("n")


main()
