"""Environments and tools in Python, behind the questions of docs/reference/protocols.md."""
import inspect
import itertools
import json

from .loading import ERRORS, Refused, as_json, call, explain, fitting, is_async
from .rewards import Reward, columns, finite, short
from .tools import describe

# What is saved of an episode that a reward function grades, which sees all turns.
SAVED = ("environment", "opening", "messages")
# Methods that are no tools, though they are public.
OWN = ("tasks", "reset", "step", "grade", "get_reward", "close", "save", "restore")
# What a step may return as a dict. As in gymnasium's tuples, `info` is for people.
KEYS = ("observation", "reward", "done", "info")


class Environments:
    """One environment for each rollout, made by a class (or any callable without arguments), and functions as tools.

    - `reset(**columns)` starts the episode: it gets the prompt, the seed and the columns that it
      names. It returns None, text that is appended to the last message (as in TRL), or messages;
      gymnasium's `(observation, info)`, too.
    - `step(text)` answers a turn without a call: the next text or message for the model;
      `(observation, reward, done)`, or gymnasium's tuples of four and five; or a dict with these
      keys. None ends the episode.
    - Without `step`, public methods are tools, as in TRL, and a turn without a call ends the episode.
    - `get_reward()` or `grade()` grades the rollout; else `reward_function` does, with TRL's arguments.
    - `tasks()`, a static function, yields prompts for `task.kind = "environment"`.
    - `save()` and `restore(state)` are optional: without them a resumed rollout's turns are replayed.
    """

    takes_tokens = False
    takes_groups = False
    needs = ()

    def __init__(self, make, functions=(), reward=None):
        self.make, self.functions = make, list(functions)
        self.reward = Reward(reward, knows=("environments", "environment")) if reward else None
        self.open = {}
        # Tools and methods are called one at a time unless they wait.
        methods = [member for _, member in inspect.getmembers(make, inspect.isfunction)] if inspect.isclass(make) else []
        # `tasks` is asked before the first episode.
        called = self.functions + [method for method in methods if not method.__name__.startswith("_") and method.__name__ != "tasks"]
        own = bool(called) and all(is_async(function) for function in called)
        # A reward function that does not wait would hold up the event loop.
        self.is_async = own and (self.reward is None or self.reward.is_async)
        for function in self.functions:
            describe(function)
        if make is not None:
            instance = make()
            if not callable(getattr(instance, "reset", None)):
                raise Refused(f"{short(make)} makes environments without a method `reset`")
            tools_of(instance, ())

    async def answer(self, question):
        if question["do"] == "tasks":
            return {"tasks": await call(self.tasks, question.get("limit"))}
        do, name = question["do"], question["episode"]
        if do == "close":
            return await self.close(name)
        if do == "reset":
            self.open[name] = episode = await call(Episode, self, question)
            return await episode.reset()
        episode = self.open.get(name)
        if episode is None:
            # Its process ended: the state says how to go on, if it was saved.
            raise Refused(f"no episode {name} is open here; it may have been lost with an earlier process")
        await episode.catch_up(question.get("state"))
        if do == "step":
            return await episode.step(question)
        if do == "grade":
            grade = await episode.grade()
            await self.close(name)
            return grade
        raise Refused(f"unknown question {do!r}")

    def tasks(self, limit):
        """Returns the records of the class's function `tasks`: prompts, or dicts with `prompt` or `messages` and columns."""
        tasks = getattr(self.make, "tasks", None)
        if tasks is None:
            raise Refused(f"{short(self.make)} has no function `tasks`; add one that yields prompts, or name a data set in [task]")
        return [record(task) for task in itertools.islice(tasks(), limit)]

    async def close(self, name):
        episode = self.open.pop(name, None)
        if episode and callable(getattr(episode.of, "close", None)):
            try:
                await call(episode.of.close)
            except ERRORS as error:
                print(f"close() failed: {explain(error)}", flush=True)
        return {}


class Episode:
    def __init__(self, environments, question):
        self.environments, self.question = environments, question
        self.of = environments.make() if environments.make else None
        self.tools = tools_of(self.of, environments.functions)
        self.messages, self.opening, self.state = question["messages"], 0, None

    async def reset(self):
        values = {**columns(self.question["metadata"]), "prompt": self.messages, "seed": self.question["seed"]}
        observation = await call(self.of.reset, **fitting(self.of.reset, values)) if self.of else None
        if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
            observation, _ = observation
        if isinstance(observation, str):
            last = self.messages[-1]
            self.messages = self.messages[:-1] + [{**last, "content": last["content"] + observation}]
        elif observation is not None:
            self.messages = as_messages(observation)
        self.opening = len(self.messages)
        return await self.with_state({"messages": self.messages, "tools": [describe(tool) for tool in self.tools.values()]})

    async def step(self, turn):
        self.messages = self.messages + [{"role": "assistant", "content": turn["text"]}]
        if turn["calls"] or turn["malformed"]:
            results = [await self.use(one) for one in turn["calls"]]
            reply = {"results": results}
            self.messages = self.messages + [{"role": "tool", "content": one["content"]} for one in results]
        elif hasattr(self.of, "step"):
            reply = outcome(await call(self.of.step, turn["text"]))
            self.messages = self.messages + reply.get("messages", [])
        else:
            reply = {"done": True}
        return await self.with_state(reply)

    async def use(self, one):
        try:
            result = await call(self.tools[one["name"]], **one["arguments"])
        except ERRORS as error:
            # A mistake of the model, as in TRL.
            return {"content": str({"error": str(error)}), "success": False}
        return {"content": str(result), "success": True}

    async def grade(self):
        if self.environments.reward:
            return await self.by_function()
        own = next((getattr(self.of, name) for name in ("get_reward", "grade") if hasattr(self.of, name)), None)
        result = await call(own) if own else 0.0
        if not isinstance(result, dict):
            return {"reward": graded(result)}
        grade = {"reward": graded(result.get("reward")), "metadata": result.get("metadata", {})}
        return {**grade, "correct": bool(result["correct"])} if result.get("correct") is not None else grade

    async def by_function(self):
        replies = [turn["content"] for turn in self.messages[self.opening:] if turn["role"] == "assistant"]
        metadata = {**self.question["metadata"], "conversation": self.messages}
        sample = {"index": self.question["index"], "response": "".join(replies), "status": "completed", "metadata": metadata}
        question = {"prompt": self.question["messages"][-1]["content"], "messages": self.messages[: self.opening], "samples": [sample]}
        answer = await self.environments.reward.answer(question, {"environments": [self.of], "environment": self.of})
        reward = answer["rewards"][0]
        if not isinstance(reward, dict):
            return {"reward": reward}
        if "error" in reward:
            raise Refused(reward["error"])
        return {"reward": graded(reward["reward"]), "metadata": {f"reward_{name}": part for name, part in reward.get("parts", {}).items()}}

    async def with_state(self, reply):
        if callable(getattr(self.of, "save", None)):
            self.state = await call(self.of.save)
            if self.environments.reward:
                self.state = dict(zip(SAVED, (self.state, self.opening, self.messages)))
            # The state may be an object that changes; it travels as JSON.
            reply["state"] = self.state = json.loads(as_json(self.state))
        return reply

    async def catch_up(self, state):
        if state is None or state == self.state:
            return
        self.state = state
        if self.environments.reward and isinstance(state, dict) and set(state) == set(SAVED):
            state, self.opening, self.messages = (state[key] for key in SAVED)
        await call(self.of.restore, state)


def tools_of(instance, functions):
    """Returns the tools of an environment by name."""
    tools = list(functions)
    if instance is not None and not hasattr(instance, "step"):
        methods = inspect.getmembers(instance, inspect.ismethod)
        tools += [method for name, method in methods if name not in OWN and not name.startswith("_")]
    for tool in tools:
        describe(tool)
    return {tool.__name__: tool for tool in tools}


def record(task):
    if isinstance(task, str):
        return {"messages": [{"role": "user", "content": task}]}
    if not isinstance(task, dict) or not ("prompt" in task or "messages" in task):
        raise Refused(f"tasks() yielded {short(task)}; expected is text, or a dict with `prompt` or `messages`")
    others = {name: value for name, value in task.items() if name not in ("prompt", "messages")}
    return {**others, "messages": as_messages(task.get("messages", task.get("prompt")))}


def as_messages(observation):
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, dict):
        observation = [observation]
    if not isinstance(observation, list) or not all(isinstance(turn, dict) and "content" in turn for turn in observation):
        raise Refused(f"the environment returned {short(observation)}; expected is text, or messages with `role` and `content`")
    return [{"role": "user", **turn} for turn in observation]


def outcome(result):
    """Returns what a step returned in the protocol's form."""
    if result is None:
        return {"done": True}
    if isinstance(result, tuple):
        if len(result) not in (3, 4, 5):
            raise Refused(f"step() returned {len(result)} values; expected are (observation, reward, done) or gymnasium's 4 or 5")
        done = bool(result[2]) or (len(result) == 5 and bool(result[3]))
        result = {"observation": result[0], "reward": result[1], "done": done}
    if not isinstance(result, dict) or "content" in result and not any(key in result for key in KEYS):
        return {"messages": as_messages(result)}
    unknown = [str(key) for key in result if key not in KEYS]
    if unknown:
        raise Refused(f"step() returned a dict with `{unknown[0]}`; its keys are `observation`, `reward` and `done`, or it is a message with `content`")
    reply = {"reward": graded(result.get("reward") or 0.0), "done": bool(result.get("done", False))}
    if result.get("observation") is not None and not reply["done"]:
        reply["messages"] = as_messages(result["observation"])
    return reply


def graded(value):
    value = finite(value, "the environment")
    if value is None:
        raise Refused("the environment returned no number as reward")
    return value
