"""Let a CUDA build of torch be imported without a GPU and without its gigabytes of CUDA packages.

    python -m tools.versions.cuda_stubs path/to/site-packages/torch

For every shared library that torch's own need and that is not there, an empty one is compiled
beside them, with the symbols they ask for by name and version, as functions that return 0: torch
registers its kernels while it is loaded, and then finds no GPU.
"""

import collections
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def _printed(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def missing(folder: Path) -> set[str]:
    """Names of libraries that those in ``folder`` need and the system does not have."""
    lines = (line for so in folder.glob("*.so*") for line in _printed("ldd", so).splitlines())
    return {line.split()[0] for line in lines if "not found" in line and "=>" in line}


def wanted(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Library -> version -> symbols that the libraries in ``folder`` import from it."""
    found: dict[str, dict[str, set[str]]] = collections.defaultdict(
        lambda: collections.defaultdict(set)
    )
    for so in folder.glob("*.so*"):
        owner, library = {}, ""
        for line in _printed("readelf", "-W", "-V", so).splitlines():
            if named := re.search(r"File: (\S+)", line):
                library = named[1]
            elif version := re.search(r"Name: (\S+)\s+Flags", line):
                owner[version[1]] = library
        for line in _printed("nm", "-D", "--undefined-only", so).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            if version in owner:
                found[owner[version]][version].add(symbol)
    return found


def unresolved(folder: Path) -> set[str]:
    """C symbols without a version that no library provides; Python's come from the interpreter."""
    lines = (line for so in folder.glob("*.so*") for line in _printed("ldd", "-r", so).splitlines())
    found = {m[1] for line in lines if (m := re.search(r"undefined symbol: (\w+)\s", line))}
    return {symbol for symbol in found if not re.match(r"_?Py|_Z", symbol)}


def make(folder: Path) -> list[str]:
    """Compile what is missing into ``folder``; the names of the libraries made."""
    made: list[str] = []
    while names := missing(folder) - set(made):
        symbols = wanted(folder)
        for name in sorted(names):
            _compile(folder / name, symbols.get(name, {}))
            made.append(name)
    rest = unresolved(folder)
    for name in made:
        if name not in wanted(folder):
            _compile(folder / name, {"": rest})
    return made


def _compile(target: Path, versions: dict[str, set[str]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        source, script = Path(place, "stub.c"), Path(place, "stub.map")
        names = {symbol for symbols in versions.values() for symbol in symbols}
        source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(names)))
        script.write_text(
            "".join(f"{v} {{ {'; '.join(sorted(names))}; }};\n" for v, names in versions.items())
        )
        scripted = [f"-Wl,--version-script={script}"] if any(versions) else []
        command = ["cc", "-shared", "-fPIC", "-o", str(target), str(source)]
        subprocess.run([*command, f"-Wl,-soname,{target.name}", *scripted], check=True)


if __name__ == "__main__":
    print("stubs:", *make(Path(sys.argv[1], "lib")) or ["none needed"])
