"""In the place of SGLang's kernels, which have no wheel for CPUs: every name can be imported, and what is called says that it is not there.

SGLang's torch-native path calls none of them.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0"
__path__ = []


class Absent:
    def __init__(self, name):
        self.name = name

    def __call__(self, *_, **__):
        raise NotImplementedError(f"sgl_kernel.{self.name} is not there: this is a CPU without SGLang's kernels")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.name}.{name}")


def _absent(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return copy_all_layer_kv_cache_cpu if name == "copy_all_layer_kv_cache_cpu" else Absent(name)


def copy_all_layer_kv_cache_cpu(*_, **__):
    """SGLang looks at its signature."""
    Absent("copy_all_layer_kv_cache_cpu")()


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__, module.__getattr__ = [], _absent
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(Submodules())
__getattr__ = _absent
