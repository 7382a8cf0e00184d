"""Answers the questions of a run over pipes: one JSON object a line, in and out.

The first line answers how the file loaded: `{"ready": {...}}` or `{"failed": "why"}`. Each further
line carries the `id` of its question. Functions run in the main thread, as their authors expect:
async ones at the same time, others one after the other. If there are both, async ones run in another thread.
"""
import asyncio
import json
import os
import signal
import sys
import threading

from .loading import ERRORS, Refused, as_json, explain, load, serve
from .running import IN_WORKER


def serving(settings):
    """Returns what answers the questions of `settings`: a reward, or environments."""
    if settings["serves"] == "reward":
        from .rewards import Reward

        return Reward(load(settings["file"], settings["name"]))
    if settings["serves"] == "verifiers":
        from .verifiers_env import Verifiers

        return Verifiers(settings["name"], settings["config"], settings.get("harness"))
    if settings["serves"] == "openenv":
        from .openenv_env import OpenEnv

        return OpenEnv(settings["url"], settings["timeout"])
    from .environments import Environments

    reward = settings.get("reward_function")
    tools = [load(settings["file"], name) for name in settings.get("tools", [])]
    made = load(settings["file"], settings["name"]) if settings.get("name") else None
    return Environments(made, tools, load(settings["file"], reward) if reward else None)


def limit_memory(megabytes):
    if not megabytes:
        return
    try:
        import resource
    except ImportError:
        raise Refused("memory_mb: this system has no limits of memory")
    # Private memory on Linux; elsewhere the address space.
    kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    resource.setrlimit(kind, (megabytes << 20, megabytes << 20))


def write(answers, answer):
    answers.write(as_json(answer) + b"\n")
    answers.flush()


def end():
    """Ends this process and those that user code started. User code may be in the middle of anything."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def main(questions):
    answers = os.fdopen(os.dup(1), "wb")
    # What user code prints or reads is no part of the protocol.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ[IN_WORKER] = "1"
    settings = json.loads(questions.readline())
    try:
        limit_memory(settings.get("memory_mb"))
        server = serving(settings)
    except ERRORS as error:
        return write(answers, {"failed": explain(error)})
    of = {"concurrent": server.is_async, "tokens": server.takes_tokens, "groups": server.takes_groups, "needs": sorted(server.needs)}
    write(answers, {"ready": of})
    answer_all(server, questions, answers)


def answer_all(server, questions, answers):
    loop = asyncio.new_event_loop()
    # Tasks that nothing refers to may be collected.
    running = set()

    async def respond(line):
        question = json.loads(line)
        try:
            write(answers, {"id": question["id"], "answer": await server.answer(question)})
        except ERRORS as error:
            write(answers, {"id": question["id"], "error": explain(error)})

    def begin(line):
        task = loop.create_task(respond(line))
        running.add(task)
        task.add_done_callback(running.discard)

    def read():
        for line in questions:
            loop.call_soon_threadsafe(begin, line)
        # The run has ended, or ends this process.
        end()

    threading.Thread(target=read, daemon=True).start()
    serve(loop, server.is_async)
