"""Lets vLLM on a processor take weights from a trainer on the stand-in GPU (tests/stand_in_gpu), for whose memory and groups this replaces functions of CUDA.

Memory is shared memory, whose name is its handle. A group's id is the address of a store, at which a group of Gloo meets. All else of vLLM's weight transfer is
vLLM's own. Python imports this in a server whose PYTHONPATH has this folder.
"""

import contextlib
import datetime
import importlib.abc
import importlib.util
import sys
import types

GPU = "10101010-1010-1010-1010-101010101010"


def mapped(cls, size, stride, offset, storage, dtype, device, handle, bytes, *rest):
    import torch

    return torch.from_file("/dev/shm" + handle.rstrip(b"\0").decode(), shared=True, size=bytes, dtype=dtype)


class Group:
    def __init__(self, id, rank, size):
        from torch.distributed import ProcessGroupGloo, TCPStore

        host, port = id.rstrip(b"\0").decode().split()
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        self.gloo = ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=60))

    def broadcast(self, tensor, src, stream=None):
        self.gloo.broadcast(tensor, src).wait()

    def destroy(self):
        pass


def joined(id, rank, size, device):
    import torch

    group = Group(id, rank, size)
    # The warm-up of PyNcclCommunicator.
    group.gloo.allreduce(torch.zeros(1)).wait()
    return group


def replace(name, module):
    import torch

    if name == "torch.multiprocessing.reductions":
        module.rebuild_cuda_tensor = mapped
        torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(uuid=GPU)
    elif name == "vllm.distributed.weight_transfer.nccl_common":
        module.uid_init_process_group = joined
        torch.accelerator.current_device_index = lambda: 0
    elif name == "vllm.distributed.weight_transfer.packed_tensor":
        module._get_streams = lambda device, count: (types.SimpleNamespace(synchronize=lambda: None),) * count
        torch.cuda.stream = lambda stream: contextlib.nullcontext()


class Finder(importlib.abc.MetaPathFinder):
    """Replaces functions of a module right after its import."""

    names = {
        "torch.multiprocessing.reductions",
        "vllm.distributed.weight_transfer.nccl_common",
        "vllm.distributed.weight_transfer.packed_tensor",
    }

    def find_spec(self, name, path, target=None):
        if name not in self.names:
            return None
        self.names.discard(name)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            replace(name, module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
