import os, signal, sys


def drive():
    mark, seconds, program, tests = eval(sys.stdin.read())
    out, write, setitimer = os.dup(1), os.write, signal.setitimer

    def late(*_):
        raise TimeoutError("it took too long")

    def run(code, name, scope):
        try:
            setitimer(signal.ITIMER_REAL, seconds)
            exec(compile(code, name, "exec"), scope)
            return ""
        except BaseException as error:
            return (type(error).__name__ + ": " + str(error)).split("\n")[0][:200]
        finally:
            setitimer(signal.ITIMER_REAL, 0)

    signal.signal(signal.SIGALRM, late)
    sys.stdin.close()
    scope = {"__name__": "answer"}
    wrong = run(program, "answer", scope)
    for at, test in enumerate(tests):
        said = wrong or run(test, "test", dict(scope))
        write(out, ("\n%s %d %s\n" % (mark, at, said or "passed")).encode("utf-8", "replace"))


drive()
