"""Environments of OpenEnv's servers (openenv-core 0.3), by their own client and its WebSocket sessions.

The server's schema of an action decides how the model acts:

- calls of tools (an MCP environment): the environment's tools are the model's;
- one required text: each turn's text is the action;
- otherwise: a tool `act` with the schema's fields.
"""
import json
import urllib.request

from .loading import Refused

# Fields of every action and observation that say nothing to the model.
INNER = ("metadata", "done", "reward", "type")


class OpenEnv:
    """Answers the questions of docs/reference/protocols.md about one server's environments."""

    takes_tokens = False
    takes_groups = False
    needs = ()
    is_async = True

    def __init__(self, url, timeout):
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ImportError as error:
            raise Refused(f"openenv can't be imported ({error}); install openenv-core 0.3 into this Python, or name another: environment.python")
        self.connect = lambda: GenericEnvClient(base_url=url, message_timeout_s=timeout)
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=timeout) as page:
                action = json.load(page)["action"]
        except (OSError, ValueError, KeyError) as error:
            raise Refused(f"{url}/schema can't be read ({error}); start the environment's server, and name its address: environment.url")
        self.fields = {name: of for name, of in action.get("properties", {}).items() if name not in INNER}
        required = [name for name in action.get("required", []) if name in self.fields]
        texts = [name for name in required if self.fields[name].get("type") == "string"]
        self.calls = {"tool_name", "arguments"} <= set(self.fields)
        self.text = texts[0] if len(required) == len(texts) == 1 and not self.calls else None
        parameters = {"type": "object", "properties": self.fields, "required": required}
        if "$defs" in action:
            parameters["$defs"] = action["$defs"]
        purpose = action.get("description") or "Acts in the environment."
        self.act = {"name": "act", "description": purpose, "parameters": parameters}
        self.open = {}

    async def answer(self, question):
        do, name = question["do"], question["episode"]
        if do == "reset":
            self.open[name] = client = self.connect()
            return await self.reset(client, question)
        if do == "close":
            return await self.close(name)
        client = self.open.get(name)
        if client is None:
            raise Refused(f"no episode {name} is open here; it may have been lost with an earlier process")
        if do == "step":
            return await self.step(client, question)
        if do == "grade":
            await self.close(name)
            return {"reward": 0.0}
        raise Refused(f"unknown question {do!r}")

    async def close(self, name):
        client = self.open.pop(name, None)
        if client:
            await client.close()
        return {}

    async def reset(self, client, question):
        result = await client.reset(seed=question["seed"])
        tools = [] if self.text else [self.act]
        if self.calls:
            listed = await client.step({"type": "list_tools"})
            tools = [tool(one) for one in listed.observation.get("tools", [])]
        messages = question["messages"]
        text = shown(result.observation)
        if text:
            messages = messages + [{"role": "user", "content": text}]
        return {"messages": messages, "tools": tools}

    async def step(self, client, turn):
        if turn["calls"]:
            reply = {"results": [], "reward": 0.0, "done": False}
            for one in turn["calls"]:
                action = {"type": "call_tool", "tool_name": one["name"], "arguments": one["arguments"]} if self.calls else one["arguments"]
                result = await client.step(action)
                read = called if self.calls else lambda observation: (shown(observation), True)
                content, success = read(result.observation)
                reply["results"].append({"content": content, "success": success})
                reply["reward"] += float(result.reward or 0.0)
                reply["done"] |= bool(result.done)
            return reply
        if self.text is None or turn["malformed"]:
            # A turn without an action ends an episode of tools.
            return {"done": not turn["malformed"]}
        result = await client.step({self.text: turn["text"]})
        reply = {"reward": float(result.reward or 0.0), "done": bool(result.done)}
        if not result.done:
            reply["messages"] = [{"role": "user", "content": shown(result.observation)}]
        return reply


def tool(listed):
    schema = listed.get("input_schema") or listed.get("inputSchema") or {"type": "object"}
    return {"name": listed["name"], "description": listed.get("description") or "", "parameters": schema}


def called(observation):
    """Returns what the model reads of a tool's result, and whether the call succeeded."""
    if observation.get("error"):
        return observation["error"].get("message", json.dumps(observation["error"])), False
    result = observation.get("result")
    if not isinstance(result, dict):
        return shown({"result": result}), True
    texts = [part["text"] for part in result.get("content") or [] if part.get("type") == "text"]
    return "\n".join(texts) if texts else json.dumps(result.get("data")), not result.get("is_error")


def shown(observation):
    """Returns what the model reads of an observation: its one text, or its fields as JSON."""
    if not isinstance(observation, dict):
        return str(observation)
    fields = {name: value for name, value in observation.items() if name not in INNER and value is not None}
    if len(fields) == 1:
        (value,) = fields.values()
        return value if isinstance(value, str) else json.dumps(value)
    return json.dumps(fields) if fields else ""
