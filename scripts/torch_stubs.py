"""Makes stand-ins for the NVIDIA libraries that a wheel of torch is linked with, so that its CPU half can be imported without them (3 GB).

    python torch_stubs.py WHEEL OUT

WHEEL is the folder that holds `torch`. Nothing in a stand-in does anything but end the process; a machine without a GPU calls none of it.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path


def readelf(option, library):
    return subprocess.run(["readelf", option, "-W", library], capture_output=True, text=True, check=True).stdout


def main(wheel, out):
    ours = [path for path in (wheel / "torch/lib").iterdir() if ".so" in path.name]
    present = ours + [path for path in wheel.glob("nvidia/**/*.so*")]
    names, defined = {path.name for path in present}, set()
    missing, undefined = set(), defaultdict(lambda: defaultdict(set))
    for library in present:
        for line in readelf("--dyn-syms", library).splitlines():
            if (parts := line.split()) and len(parts) > 7 and parts[6] != "UND":
                defined.add(parts[7].split("@")[0])
    for library in ours:
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-d", library))
        missing |= {name for name in needed if re.match(r"lib(cu|nccl|nv)", name) and name not in names}
    unversioned = min(missing)
    for library in ours:
        file_of, file = {}, None
        for line in readelf("-V", library).splitlines():
            if found := re.search(r"File: (\S+)", line):
                file = found[1]
            elif file and (found := re.search(r"Name: (\S+)", line)):
                file_of[found[1]] = file
        for line in readelf("--dyn-syms", library).splitlines():
            parts = line.split()
            if len(parts) < 8 or parts[6] != "UND" or parts[4] == "WEAK":
                continue
            name, _, version = parts[7].partition("@")
            file = file_of.get(version) if version else unversioned
            if file in missing and name not in defined:
                undefined[file][version].add(name)
    out.mkdir(parents=True, exist_ok=True)
    for library in sorted(missing):
        versions = undefined[library]
        source, script = out / "stub.c", out / "stub.map"
        symbols = sorted(set().union(*versions.values()) if versions else set())
        source.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in symbols))
        nodes = [f"{version} {{ global: {' '.join(f'{name};' for name in sorted(of))} }};" for version, of in versions.items() if version]
        script.write_text("\n".join(nodes))
        versioned = [f"-Wl,--version-script={script}"] if nodes else []
        subprocess.run(["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library}", *versioned, "-o", out / library, source], check=True)
        source.unlink(), script.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
