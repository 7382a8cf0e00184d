"""Holds files of `rollflow deploy` against the schemas of their platforms:  check_deploy.py FOLDER

Kubernetes: kubernetes-validate's, strictly. SkyPilot: its own. Compose: compose-spec's parser.
"""

import pathlib
import re
import sys

import compose_spec
import jsonschema
import kubernetes_validate
import yaml
from sky.utils import schemas as sky

folder = pathlib.Path(sys.argv[1])

checked = 0
for path in sorted(folder.glob("*.yaml")):
    documents = list(yaml.safe_load_all(path.read_text()))
    if ".kubernetes." in path.name:
        for document in documents:
            kubernetes_validate.validate(document, "1.34", strict=True)
            checked += 1
    elif ".skypilot." in path.name:
        for document in documents:
            if "execution" in document:
                assert set(document) <= {"name", "execution", "primary_tasks", "termination_delay", "inter_connection"}, document
            else:
                jsonschema.validate(document, sky.get_task_schema())
                known = set(sky.get_resources_schema()["properties"])
                assert set(document["resources"]) <= known, set(document["resources"]) - known
            checked += 1
    else:
        # The parser does not know the number of restarts, which the specification has.
        text = re.sub(r"(restart: on-failure):\d+", r"\1", path.read_text())
        compose_spec.PyCompose.from_yaml(text).to_spec()
        checked += 1
print(f"{checked} documents are as their platforms want them")
assert checked >= 15, checked
