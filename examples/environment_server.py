"""A game served to rollflow, with Python's standard library: guess a number, with a tool that compares. Prints its address; port 0 takes a free one."""
import json, random, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOOL = {"name": "compare", "description": "Compares a guess with the hidden number.",
        "parameters": {"type": "object", "properties": {"guess": {"type": "integer"}}, "required": ["guess"]}}


def answer(ask, state):
    if ask["do"] == "reset":
        hidden = random.Random(ask["seed"] + ask["prompt"]).randint(1, 9)
        return {"messages": ask["messages"], "tools": [TOOL], "state": {"hidden": hidden, "found": False, "tries": 0}}
    if ask["do"] == "step":
        results = []
        for call in ask["calls"]:
            guess = call["arguments"]["guess"]
            state["tries"] += 1
            state["found"] |= guess == state["hidden"]
            results.append({"content": "found" if state["found"] else "higher" if guess < state["hidden"] else "lower"})
        return {"results": results, "done": state["found"] or not results, "state": state}
    return {"reward": 1.0 / state["tries"] if state and state["found"] else 0.0, "correct": bool(state and state["found"])}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        page = json.dumps(answer(ask, ask.get("state"))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0), Handler)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
