"""Serves a reward function, an environment or tools to runs on other hosts, over HTTP.

    python -m rollflow.serve_env my_reward.py:reward
    python -m rollflow.serve_env my_env.py:Wordle --host 0.0.0.0 --port 9000 --token-env ENV_TOKEN
    python -m rollflow.serve_env my_tools.py:search,fetch

A class is an environment, one function is a reward, and functions with `--tools` are tools. A recipe
names the printed address: `kind = "http"` with `url`, in [reward] or [environment].
"""
import argparse
import asyncio
import hmac
import inspect
import ipaddress
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .environments import Environments
from .loading import ERRORS, Refused, as_json, explain, load, serve
from .rewards import Reward

LONGEST = 64 << 20
# Seconds that a connection may be silent.
SILENCE = 600


def serving(target, tools, reward):
    """Returns what answers questions about `target`, such as `my_env.py:Wordle`."""
    where, _, names = target.partition(":")
    found = [load(where, name) for name in names.split(",") if name]
    if not found:
        raise Refused(f"{target} names no function or class; write my_reward.py:reward")
    reward = load(*reward.split(":")) if reward else None
    if tools or len(found) > 1:
        return Environments(None, found, reward)
    if inspect.isclass(found[0]) and hasattr(found[0], "reset"):
        return Environments(found[0], (), reward)
    if reward:
        raise Refused(f"{target} is a reward itself; --reward is for an environment or tools")
    return Reward(found[0])


def name_of(host):
    """Returns a host's name in lower case, without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and (not port or port.isdigit()) else host).strip("[]").rstrip(".").lower()


def address_of(name):
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def refusal(host, origin, is_local):
    """Returns why a server without a token refuses a request, or None. `is_local`: if true, it listens on a loopback address.

    A web page can give its own name to a loopback address, and can send requests whose answers it cannot read.
    """
    name = name_of(host)
    if is_local and name != "localhost" and not name.endswith(".localhost") and address_of(name) is None:
        return f"the host {host[:253]!r} is not allowed here: ask for localhost or an IP address, or start with --token-env"
    if origin is None:
        return None
    page = origin.partition("://")[2]
    name = name_of(page)
    address = address_of(name)
    is_here = name == "localhost" or name.endswith(".localhost") or (address is not None and address.is_loopback)
    if is_here or (page and page == host):
        return None
    return f"the web page {origin[:253]!r} is not allowed here: without a token, this server answers pages of this machine alone"


def handler(server, loop, token):
    # Functions that are not async run one at a time, as in a run's own processes.
    turn = threading.Lock() if not server.is_async else None

    def answer(question):
        return asyncio.run_coroutine_threadsafe(server.answer(question), loop).result()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = SILENCE

        def do_POST(self):
            is_local = ipaddress.ip_address(self.server.server_address[0]).is_loopback
            refused = None if token else refusal(self.headers.get("Host", ""), self.headers.get("Origin"), is_local)
            if refused:
                return self.refuse(403, refused)
            given = self.headers.get("Authorization", "")
            if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return self.refuse(401, "the token is missing or wrong")
            length = self.headers.get("Content-Length", "0")
            if not (length.isascii() and length.isdigit()):
                return self.refuse(400, "Content-Length is no number of bytes")
            if len(length) > 18 or int(length) > LONGEST:
                return self.refuse(413, f"the request is too long; at most {LONGEST} bytes are read")
            body = self.rfile.read(int(length))
            try:
                question = json.loads(body)
            except ValueError as error:
                return self.reply(400, {"error": f"the request is no JSON: {error}"})
            try:
                if turn is None:
                    return self.reply(200, answer(question))
                with turn:
                    return self.reply(200, answer(question))
            except ERRORS as error:
                return self.reply(200, {"error": explain(error)})

        def refuse(self, status, why):
            """Ends the connection, since what follows was not read."""
            self.close_connection = True
            self.reply(status, {"error": why})

        def reply(self, status, page):
            body = as_json(page)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Handler


def main():
    parser = argparse.ArgumentParser(prog="python -m rollflow.serve_env", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="file.py:name or module:name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument("--tools", action="store_true", help="the names are functions that the model may call")
    parser.add_argument("--reward", help="file.py:name of a function that grades rollouts of the environment")
    parser.add_argument("--token-env", help="environment variable with a token that requests must carry")
    args = parser.parse_args()
    token = os.environ.get(args.token_env) if args.token_env else None
    if args.token_env and not token:
        sys.exit(f"serve_env: the environment variable {args.token_env} is not set")
    try:
        server = serving(args.target, args.tools, args.reward)
    except ERRORS as error:
        sys.exit(f"serve_env: {explain(error)}")
    loop = asyncio.new_event_loop()
    http = ThreadingHTTPServer((args.host, args.port), handler(server, loop, token))
    threading.Thread(target=http.serve_forever, daemon=True).start()
    print(f"http://{args.host}:{http.server_port}", flush=True)
    try:
        # User code runs in the main thread, where signals work.
        serve(loop, server.is_async)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
