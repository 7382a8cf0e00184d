#!/usr/bin/env python3
"""Writes python/tests/golden_tools.json: descriptions of tools by transformers.utils.get_json_schema.

    python3 scripts/golden_tools.py        # in an environment with transformers
"""
import inspect, json, pathlib, sys

from transformers.utils import get_json_schema

tests = pathlib.Path(__file__).resolve().parent.parent / "python/tests"
sys.path.insert(0, str(tests))
import golden_tools

tools = {name: get_json_schema(tool) for name, tool in vars(golden_tools).items() if inspect.isfunction(tool)}
(tests / "golden_tools.json").write_text(json.dumps(tools, indent=1) + "\n")
