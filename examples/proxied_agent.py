"""An agent that knows nothing of rollflow: it works on a task with a tool, through whatever OpenAI-compatible server it is pointed at.

rollflow starts it for every rollout, with the server in OPENAI_BASE_URL and the task on standard input. The last line that it prints is
what the rollout earned."""
import json, os, sys, urllib.request

BASE = os.environ["OPENAI_BASE_URL"]
TOOL = {"type": "function", "function": {
    "name": "calculator", "description": "Works an expression out.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}


def post(path, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return urllib.request.urlopen(urllib.request.Request(BASE + path, json.dumps(body).encode(), headers))


def ask(messages):
    """The model's next turn, put together from a stream."""
    turn, calls = {"role": "assistant", "content": ""}, []
    body = {"model": "policy", "messages": messages, "tools": [TOOL], "stream": True}
    for line in post("/chat/completions", body):
        if not line.startswith(b"data: ") or b"[DONE]" in line:
            continue
        delta = json.loads(line[6:])["choices"][0]["delta"]
        turn["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": ""}})
            calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")
    return {**turn, "tool_calls": calls} if calls else turn


task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["prompt"]}]
while True:
    turn = ask(messages)
    messages.append(turn)
    if not turn.get("tool_calls"):
        break
    for call in turn["tool_calls"]:
        a, b = json.loads(call["function"]["arguments"])["expression"].split("+")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(int(a) + int(b))})
right = messages[-1]["content"].strip().endswith(task["metadata"]["answer"])
print(json.dumps({"reward": 1.0 if right else 0.0, "correct": right}))
