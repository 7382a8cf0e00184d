#!/usr/bin/env python3
"""Compiles the GPU's kernels for every generation of cards that we support, as the program does on a card, on a machine without one.

NVIDIA's compiler comes from the same release as libtorch's (a wheel of 90 MB, kept in ${ROLLFLOW_CACHE:-~/.cache/rollflow}).
"""

import concurrent.futures
import ctypes
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER = "nvidia-cuda-nvrtc==13.0.88"
CARDS = {"sm_80": "A100", "sm_89": "L4, L40S", "sm_90": "H100, H200", "sm_100": "B200", "sm_120": "RTX 50, RTX PRO"}
# As gpu.rs joins them.
SOURCES = ("args.h", "common.cu", "rows.cu", "experts.cu", "draw.cu", "delta.cu", "attend.cu")
# Widths of the heads of a delta net. Those of values decide how many threads a block has, which share a GPU's registers.
DELTA = [(128, 128), (128, 256), (256, 160), (192, 192)]
REGISTERS = re.compile(r"Compiling entry function 'delta_step'.*?Used (\d+) registers", re.DOTALL)
# Size of a head, heads, heads of keys, rotated columns of a head, and whether outputs have gates. The kernel of attention is compiled for each, the others don't ask.
HEADS = [(64, 14, 2, 64, 0), (128, 28, 4, 128, 0), (96, 32, 32, 72, 0), (16, 4, 2, 16, 0), (256, 8, 2, 64, 1), (128, 40, 8, 128, 0)]


def library() -> ctypes.CDLL:
    cache = Path(os.environ.get("ROLLFLOW_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rollflow")
    folder = cache / COMPILER.replace("==", "-")
    if not any(folder.rglob("libnvrtc.so.13")):
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--target", folder, COMPILER]
        subprocess.run(install, check=True)
    # Loaded as the program does it where only wheels bring NVIDIA's libraries.
    with tempfile.TemporaryDirectory() as built:
        loader = Path(built) / "nvrtc.so"
        subprocess.run(["c++", "-std=c++17", "-shared", "-fPIC", "-o", loader, ROOT / "src/model/fused/gpu/nvrtc.cpp"], check=True)
        load = ctypes.CDLL(loader).rollflow_nvrtc
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    handle = load(str(next(folder.rglob("libnvrtc.so.13")).parent).encode())
    assert handle, f"NVRTC does not load from {folder}"
    return ctypes.CDLL("libnvrtc.so.13", handle=handle)


def compiled(nvrtc: ctypes.CDLL, source: bytes, options: list[str]) -> tuple[bool, str]:
    """Whether it compiles, and what the compiler says."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(of.encode() for of in options)))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return not failed, log.value.decode()


def starts(log: str, values: int) -> bool:
    """Whether the registers of a GPU suffice for a block of `delta_step`, by the compiler's report: eight at a time, for four warps at a time."""
    return -(-int(REGISTERS.search(log)[1]) // 8) * 8 * -(-2 * values // 128) * 128 <= 1 << 16


def check(card: str, form: int, heads: tuple | None, delta: tuple[int, int]) -> str | None:
    """Compiles the kernels for one card and shape. Returns what is wrong."""
    keys, values = delta
    shape = [f"-D{name}={value}" for name, value in zip(("DIM", "HEADS", "KEYS", "ROTATED", "GATED"), heads or ())]
    shape += ["-DPAGE=32", f"-DKEY_DIM={keys}", f"-DVALUE_DIM={values}", "-DCONV=4"]
    options = [f"--gpu-architecture={card}", "--std=c++17", f"-DFORMAT={form}", *shape]
    source = b"".join((ROOT / "src/model/fused/gpu" / name).read_bytes() for name in SOURCES)
    compiles, log = compiled(NVRTC, source, [*options, "--ptxas-options=-v"])
    if not compiles:
        return f"the kernels do not compile for {CARDS[card]} with {' '.join(options)}:\n{log}"
    if not starts(log, values):
        return f"a block of delta_step has more registers than {CARDS[card]} with {' '.join(options)}:\n{REGISTERS.search(log)[0]}"
    return None


def main() -> None:
    shapes = list(zip(itertools.cycle((0, 1)), [None, None, *HEADS], [of for of in DELTA for _ in range(2)]))
    jobs = [(card, *shape) for card in CARDS for shape in shapes]
    # One process a core.
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        for problem in pool.map(check, *zip(*jobs)):
            if problem:
                sys.exit(problem)
    print(f"compiled {len(shapes)} shapes for {', '.join(CARDS)}")


if __name__ == "__main__":
    NVRTC = library()
    main()
