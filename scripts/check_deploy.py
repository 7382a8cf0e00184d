"""Holds files of `rollflow deploy` against the schemas of their platforms:  check_deploy.py FOLDER SKYPILOT_WHEEL

Kubernetes: kubernetes-validate's, strictly. SkyPilot: the schema module of its wheel, and of its resources. Compose: compose-spec's parser.
"""

import importlib.util
import pathlib
import re
import sys
import types
import zipfile

import compose_spec
import jsonschema
import kubernetes_validate
import yaml

folder, wheel = pathlib.Path(sys.argv[1]), sys.argv[2]


def sky_schemas():
    """The module sky.utils.schemas with stand-ins for what it imports, none of which the schemas of tasks need."""

    class Anything(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything(name)

        def __call__(self, *args, **kwargs):
            return []

        def __iter__(self):
            return iter(())

    for name in ["sky", "sky.skylet", "sky.skylet.autostop_lib", "sky.skylet.constants", "sky.utils", "sky.utils.kubernetes_enums"]:
        sys.modules[name] = Anything(name)
    code = zipfile.ZipFile(wheel).read("sky/utils/schemas.py")
    path = folder / "sky_schemas.py"
    path.write_bytes(code)
    spec = importlib.util.spec_from_file_location("sky_schemas", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sky, checked = sky_schemas(), 0
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
        # The parser takes what compose has filled in.
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", path.read_text())
        compose_spec.PyCompose.from_yaml(text).to_spec()
        checked += 1
print(f"{checked} documents are as their platforms want them")
assert checked >= 15, checked
