"""Lets a server on a processor map the memory of the stand-in GPU (tests/stand_in_gpu), which is shared memory with its name as the handle.

Python imports it in a server whose PYTHONPATH has this folder. Everything else of vLLM's transfer by CUDA IPC is vLLM's own.
"""

import types

try:
    import torch
    from torch.multiprocessing import reductions
except ImportError:  # A Python program without torch.
    torch = None


def rebuild(cls, size, stride, offset, storage, dtype, device, handle, bytes, *rest):
    path = "/dev/shm" + handle.rstrip(b"\0").decode()
    return torch.from_file(path, shared=True, size=bytes, dtype=dtype)


if torch is not None:
    torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(uuid="10101010-1010-1010-1010-101010101010")
    reductions.rebuild_cuda_tensor = rebuild
