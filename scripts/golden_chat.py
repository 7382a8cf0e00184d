"""Writes the cases of tests/golden/chat_templates.json: tests/golden/chat_templates/marked.jinja as transformers 5.23.0 renders it.

    python scripts/golden_chat.py
"""

import json
from pathlib import Path

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

FOLDER = Path(__file__).parent.parent / "tests/golden"
TEMPLATE = (FOLDER / "chat_templates/marked.jinja").read_text()
INTEGERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": INTEGERS}}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


asks = turn("user", "2+3?")
answered = [asks, turn("assistant", "5")]
CONVERSATIONS = {
    "user": [asks],
    "sys": [turn("system", "Be brief, é."), asks],
    "turns": [*answered, turn("user", "And 1 more? 😀"), turn("assistant", "six 😀"), turn("user", "So?")],
    "answered": answered,
    "tool": [asks, turn("assistant", "", tool_calls=CALL), turn("tool", "5", name="add"), turn("assistant", "It is 5.")],
    "late": [asks, turn("system", "Late.")],
}


def case(name, opened, variables):
    messages, tools = CONVERSATIONS[name], TOOLS if name == "tool" else None
    inputs = {"messages": messages, "tools": tools, "add_generation_prompt": opened, "variables": variables}
    given = {"conversations": [messages], "tools": tools, "chat_template": TEMPLATE, "add_generation_prompt": opened, **variables}
    try:
        [text], [spans] = render_jinja_template(**given, return_assistant_tokens_mask=True)
        expected = {"text": text, "generation_spans": spans}
    except Exception as error:
        expected = {"error": f"{type(error).__name__}: {error}"}
    return {"name": f"marked/{name}/agp={opened}/{variables}", "template": "marked", "inputs": inputs, "expected": expected}


cases = [case(name, opened, {}) for name in CONVERSATIONS for opened in (False, True)]
cases += [case(name, True, {"thinks": True}) for name in ("user", "turns")]
head = {
    "name": "a chat template of this project, rendered by transformers",
    "versions": {"transformers": transformers.__version__},
    "source": {"file": "transformers/utils/chat_template_utils.py", "called": "render_jinja_template"},
    "note": "generation_spans are character spans [start,end) inside {% generation %} blocks",
    "tolerance": {},
}
lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
text = json.dumps(head, ensure_ascii=False, indent=1)[:-2] + f',\n "cases": [\n{lines}\n ]\n}}\n'
(FOLDER / "chat_templates.json").write_text(text)
