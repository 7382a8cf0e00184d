"""Reward functions: TRL's, verl's and plain ones, behind one question and one answer."""
import asyncio
import inspect
import math
import sys

from .loading import ERRORS, Refused, call, explain, is_async, parameters

# What TRL gives beyond the columns of the data and rollflow does not have in this process.
ABSENT = {
    "environments": "a reward that reads the environment is named in [environment], as reward_function",
    "trainer_state": "the trainer is another process; use [[change]] in the recipe for a reward that changes with the step",
}

# What TRL gives with an entry for each completion, beyond the columns of the data.
LISTS = {"completions", "completion_ids", "prompts", "environments"}
# What else only TRL gives.
LOGS = {"log_metric", "log_extra"}
# What a function of each form gets, whatever the data.
GIVEN_LISTS = {"completions", "completion_ids", "prompts"} | LOGS
GIVEN_VERL = {"solution_str", "data_source", "ground_truth", "extra_info"}
GIVEN_PLAIN = {"completion", "response", "prompt", "messages", "status"}
# Where a run keeps an `answer` that is no text, as it was in the data.
ANSWER = "answer_of_record"


class Reward:
    """Answers `{"samples": [...], ...}` with `{"rewards": [...]}`: see docs/reference/protocols.md.

    The parameters of the function decide how it is called:

    - `solution_str`: once for each completion, as verl calls `compute_score`;
    - one of `LISTS` or `LOGS`, or nothing but `**kwargs`: once with lists, as TRL calls it;
    - otherwise once for each completion, by name: `completion`, `prompt`, and columns of the data.
    """

    def __init__(self, function, knows=()):
        if inspect.isclass(function):
            function = function()
        if not callable(function):
            raise Refused(f"{function!r} is no function")
        self.function = function
        self.names, self.required, self.takes_all = parameters(function)
        for name in self.required:
            if name in ABSENT and name not in knows:
                raise Refused(f"the reward function takes `{name}`: {ABSENT[name]}")
        self.is_async = is_async(function)
        # It may compare the completions of a group.
        takes_lists = bool(self.names & (LISTS | LOGS)) or (self.takes_all and not self.names)
        self.takes_groups = takes_lists and not self.names & {"solution_str", "completion"}
        given = GIVEN_LISTS if self.takes_groups else GIVEN_VERL if "solution_str" in self.names else GIVEN_PLAIN
        # Columns of the data that it can't do without.
        self.needs = set(self.required) - given - set(knows)
        self.takes_tokens = "completion_ids" in self.names or (self.takes_all and self.takes_groups)

    async def answer(self, question, more=None):
        """Answers one question; the function may take the values of `more` by name, too."""
        try:
            if self.takes_groups:
                return {"rewards": await self.batch(question, more or {})}
            one = self.verl if "solution_str" in self.names else self.plain
            each = (self.each(one(question, sample), more or {}) for sample in question["samples"])
            return {"rewards": list(await asyncio.gather(*each))}
        except ERRORS as error:
            return {"rewards": [{"error": explain(error)} for _ in question["samples"]]}

    async def each(self, values, more):
        try:
            return entry(await call(self.function, **self.given({**values, **more})))
        except ERRORS as error:
            return {"error": explain(error)}

    async def batch(self, question, more):
        samples = question["samples"]
        prompt = question.get("messages", question["prompt"])
        logged = {}
        rows = [columns(sample["metadata"]) for sample in samples]
        values = {name: [row.get(name) for row in rows] for name in sorted({key for row in rows for key in row})}

        def log_metric(name, value):
            for key, part in parts_of({name: value}).items():
                logged.setdefault(key, []).append(part)

        values.update(
            prompts=[prompt] * len(samples),
            completions=[messages(question, sample) for sample in samples],
            completion_ids=[sample.get("tokens") for sample in samples],
            log_metric=log_metric,
            log_extra=lambda column, extra: print(f"{column}: {list(extra)}", file=sys.stderr),
        )
        results = await call(self.function, **self.given({**values, **more}))
        if hasattr(results, "tolist"):
            results = results.tolist()
        if not isinstance(results, (list, tuple)):
            raise Refused(f"the reward function returned {short(results)}; it must return a list with a number for each completion")
        if len(results) != len(samples):
            raise Refused(f"the reward function returned {len(results)} rewards for {len(samples)} completions")
        # As in TRL, several calls count as their mean.
        parts = {name: sum(of) / len(of) for name, of in logged.items()}
        return [with_parts(entry_at(at, result), parts) for at, result in enumerate(results)]

    def verl(self, question, sample):
        of = columns(sample["metadata"])
        nested = of.get("reward_model")
        truth = nested.get("ground_truth") if isinstance(nested, dict) else None
        return {
            **of,
            "data_source": of.get("data_source", ""),
            "solution_str": sample["response"],
            "ground_truth": of.get("ground_truth", truth if truth is not None else of.get("answer")),
            "extra_info": of.get("extra_info", of),
        }

    def plain(self, question, sample):
        return {
            **columns(sample["metadata"]),
            "completion": sample["response"],
            "response": sample["response"],
            "prompt": question["prompt"],
            "messages": question.get("messages"),
            "status": sample["status"],
        }

    def given(self, values):
        missing = [name for name in self.required if name not in values]
        if missing:
            known = ", ".join(sorted(values))
            raise Refused(f"the reward function takes `{missing[0]}`, which is neither known here nor a column of the data; known: {known}")
        return values if self.takes_all else {name: value for name, value in values.items() if name in self.names}


def columns(metadata):
    """Returns the columns of a record. The run keeps `answer` as text, and another value of the data under a name of its own."""
    own = {name: value for name, value in metadata.items() if name != ANSWER}
    return {**own, "answer": metadata[ANSWER]} if ANSWER in metadata else own


def messages(question, sample):
    """Returns a completion in TRL's form: text for a text, a list of messages for a conversation."""
    turns = sample["metadata"].get("conversation")
    if turns is not None:
        return turns[first_reply(turns, question.get("messages", [])):]
    return [{"role": "assistant", "content": sample["response"]}] if "messages" in question else sample["response"]


def first_reply(turns, prompt):
    """Returns the index of the policy's first turn in a conversation. The prompt may have turns of an assistant, too."""
    # An environment may append text to the prompt's last message, or begin another conversation.
    begun = len(prompt) if turns[: len(prompt) - 1] == prompt[:-1] else 0
    return next((at for at in range(begun, len(turns)) if turns[at]["role"] == "assistant"), len(turns))


def entry(result):
    """Returns a result in the protocol's form: a number, an object with parts, or an error."""
    if result is None:
        return {"reward": None}
    if isinstance(result, dict):
        return of_dict(result)
    value = finite(result, "the reward function")
    if value is None:
        raise Refused(f"the reward function returned {short(result)}; a reward is a number, None, or a dict with `score` or `reward`")
    return value


def entry_at(at, result):
    """Returns one result of a list; an error for that one alone if it is no reward."""
    try:
        return entry(result)
    except ERRORS as error:
        return {"error": f"result {at} of the list: {explain(error)}"}


def of_dict(result):
    key = next((key for key in ("score", "reward") if key in result), None)
    if key is None:
        raise Refused(f"the reward function returned {short(result)}; a dict needs a key `score` or `reward`")
    value = entry(result[key])
    if isinstance(value, dict):
        raise Refused(f"the reward function returned {short(result)}; its `{key}` must be a number")
    inner = result.get("parts")
    others = inner if isinstance(inner, dict) else {name: part for name, part in result.items() if name != key}
    return {"reward": value, "parts": parts_of(others)}


def parts_of(values):
    """Returns those values that can be logged, by name: finite numbers."""
    parts = {str(name): number(value) for name, value in values.items()}
    return {name: part for name, part in parts.items() if part is not None and math.isfinite(part)}


def with_parts(value, parts):
    if not parts:
        return value
    value = value if isinstance(value, dict) else {"reward": value}
    return {**value, "parts": {**parts, **value.get("parts", {})}}


def number(value):
    """Returns a number of any library as a float; None for what is no number."""
    if isinstance(value, str) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def finite(value, giver):
    """Returns a number as a float; None for what is no number. Refuses NaN and infinity."""
    value = number(value)
    if value is not None and not math.isfinite(value):
        raise Refused(f"{giver} returned {value}; a reward must be finite")
    return value


def short(value):
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"
