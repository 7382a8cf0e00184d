import os, signal, sys


def drive():
    mark, seconds, program, tests = eval(sys.stdin.read())
    # What is used after the program ran is fetched before: it may put anything in the place of anything.
    out, write, setitimer, timer = os.dup(1), os.write, signal.setitimer, signal.ITIMER_REAL
    run_code, compiled, copied, error_of, text, most = exec, compile, dict, type, str, BaseException
    numbered = list(enumerate(tests))

    def late(*_):
        raise TimeoutError("it took too long")

    def run(code, name, scope):
        try:
            setitimer(timer, seconds)
            run_code(compiled(code, name, "exec"), scope)
            return ""
        except most as error:
            return (error_of(error).__name__ + ": " + text(error)).split("\n")[0][:200]
        finally:
            setitimer(timer, 0)

    signal.signal(signal.SIGALRM, late)
    sys.stdin.close()
    scope = {"__name__": "answer"}
    wrong = run(program, "answer", scope)
    for at, test in numbered:
        said = wrong or run(test, "test", copied(scope)) or "passed"
        write(out, ("\n%s %d %s\n" % (mark, at, said)).encode("utf-8", "replace"))


drive()
