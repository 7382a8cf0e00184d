#!/usr/bin/env python3
"""Reads Grafana's dashboard by the types that Grafana generates from its schema, and finds what they do not know: check_dashboard.py FILE."""
import copy
import json
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

# Types of panels' options and of queries.
register_default_plugins()


def unknown(given, kept, place="dashboard"):
    """Places of what is lost or changed when the types read `given` and write `kept`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [lost for key, value in given.items() for lost in (unknown(value, kept[key], f"{place}.{key}") if key in kept else [f"{place}.{key}"])]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [lost for at, pair in enumerate(zip(given, kept)) for lost in unknown(*pair, f"{place}[{at}]")]
    return [] if given == kept else [place]


def problems(given):
    return unknown(given, json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(copy.deepcopy(given)))))


dashboard = json.load(open(sys.argv[1]))
panels = [at for at, panel in enumerate(dashboard["panels"]) if panel["type"] == "timeseries"]
for broken in [("fieldConfig", "defaults"), ("options",), ("targets", 0)]:
    wrong = copy.deepcopy(dashboard)
    part = wrong["panels"][panels[0]]
    for key in broken:
        part = part[key]
    part["unheard_of"] = 1
    assert problems(wrong), f"a control was not found: {broken}"
found = problems(dashboard)
assert not found, found
legends = [target["legendFormat"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
alike = [legend for legend in legends if "{{instance}}" not in legend]
assert legends and not alike, f"series of several runs have one name: {alike}"
print(f"{len(dashboard['panels'])} panels and rows: all known to Grafana's schema")
