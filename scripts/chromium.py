"""Drives a headless Chromium over its DevTools protocol: keys, pages of any size, the accessibility tree, and times of tasks."""
import json
import pathlib
import shutil
import subprocess
import tempfile
import time
import urllib.request

import websocket

KEYS = {"Tab": 9, "Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Space": 32}
# Roles that a reader acts on, which need a name.
INTERACTIVE = {"button", "link", "textbox", "searchbox", "spinbutton", "combobox", "checkbox", "listbox", "option", "slider"}


class Chromium:
    """One browser with one page."""

    def __init__(self):
        self.folder = tempfile.mkdtemp()
        program = shutil.which("chromium") or shutil.which("google-chrome")
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--remote-debugging-port=0",
                 "--remote-allow-origins=*", f"--user-data-dir={self.folder}", "about:blank"]
        self.process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = pathlib.Path(self.folder, "DevToolsActivePort")
        until(lambda: port.exists() and port.read_text().count("\n"), "Chromium starts", 60)
        address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list"
        pages = until(lambda: [page for page in json.load(urllib.request.urlopen(address)) if page["type"] == "page"], "a page opens", 60)
        self.socket = websocket.create_connection(pages[0]["webSocketDebuggerUrl"], timeout=120, max_size=None)
        self.number, self.complaints, self.trace = 0, [], []
        self.frames = """(() => { let before = 0; self.longest_frame = 0;
          const next = (now) => { if (before) longest_frame = Math.max(longest_frame, now - before); before = now; requestAnimationFrame(next); }; requestAnimationFrame(next); })()"""
        for domain in ["Page", "Runtime", "Log", "Accessibility"]:
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=self.frames)

    def close(self):
        self.socket.close()
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method, **params):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self.take(message)

    def take(self, message):
        """Keeps errors of the page's console, and events of a trace."""
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Tracing.dataCollected":
            self.trace += params["value"]
        elif method == "Tracing.tracingComplete":
            self.trace.append(None)
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"a dialog: {params['message']}")

    def evaluate(self, script):
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def until(self, script, seconds=30):
        # A page that is still loading lacks what the script looks at.
        return until(lambda: self.evaluate(f"(() => {{ try {{ return !!({script}); }} catch {{ return false; }} }})()"), script, seconds)

    def open(self, address):
        # A change after `#` alone loads nothing.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)

    def show(self, width, dark):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 700)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def key(self, name, shift=False):
        event = {"key": name, "code": name, "windowsVirtualKeyCode": KEYS[name], "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": "\r"} if name == "Enter" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text):
        for letter in text:
            self.call("Input.dispatchKeyEvent", type="char", text=letter)

    def wheel(self, x, y, by):
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by)

    def point(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path):
        import base64
        pathlib.Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def nameless(self):
        """Elements that a reader acts on and that have no accessible name."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        def value(node, key):
            return str(node.get(key, {}).get("value", ""))
        return [value(node, "role") for node in nodes if not node.get("ignored") and value(node, "role") in INTERACTIVE and not value(node, "name").strip()]

    def longest_frame(self):
        """Longest time between two frames since the page was opened, or since this was asked, in milliseconds."""
        return self.evaluate("(() => { const found = longest_frame; longest_frame = 0; return found; })()")

    def begin_trace(self):
        self.trace = []
        self.call("Tracing.start", categories="toplevel,devtools.timeline", transferMode="ReportEvents")

    def end_trace(self):
        """Longest task of the page's thread since the trace began, in milliseconds: as a clock saw it, and as the processor did.
        On a machine that does other things, the second is the page's own."""
        self.call("Tracing.end")
        while None not in self.trace:
            self.take(json.loads(self.socket.recv()))
        events = [event for event in self.trace if event]
        mains = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"}
        tasks = [event for event in events if event["name"].endswith("RunTask") and event.get("ph") == "X" and (event["pid"], event["tid"]) in mains]
        return tuple(max((event.get(kind, 0) for event in tasks), default=0) / 1000 for kind in ("dur", "tdur"))


def until(condition, what, seconds):
    """Waits for `condition`, and returns what it is."""
    end = time.time() + seconds
    while not (found := condition()):
        assert time.time() < end, f"after {seconds} s: {what}"
        time.sleep(0.05)
    return found
