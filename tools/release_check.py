"""What a release needs, line by line: `make release-check`, exit status 1 if something is missing.

It builds the source distribution and, from that, the wheel, or takes one with `--wheel`; looks into
both; reads which versions of the C and C++ libraries the wheel asks for, by auditwheel's table; and
installs it into an empty environment, which sees this one's torch and other packages but not its
fastkd, for `fastkd doctor` and the demo's few steps. Nothing is uploaded, and nothing is tagged.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import tomllib

from tools.versions.__main__ import copy_source

ROOT = Path(__file__).resolve().parents[1]
POLICY = "manylinux_2_28"  # torch's own wheels ask for as much
MOST_BYTES = 3_000_000
IN_WHEEL = {"fastkd/py.typed", "fastkd/kernels/relation.py", "fastkd/_C.abi3.so"}
IN_SOURCE = {
    "csrc/roots.cpp",
    "csrc/roots.cu",
    "LICENSE",
    "README.md",
    "fastkd/kernels/relation.py",
}
Finding = tuple[str, bool, str]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What a command prints; if it fails that is the error."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(done.stdout)
    return done.stdout


def environment(path: Path) -> Path:
    """Interpreter of a new environment that sees this one's packages, but no editable installs.

    Through a .pth file, in which this environment's own .pth files do not count.
    """
    venv.create(path, with_pip=False, symlinks=True)
    python = path / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    ours = dict.fromkeys(sysconfig.get_paths()[key] for key in ("purelib", "platlib"))
    (Path(run(python, "-c", code, cwd=path).strip()) / "ours.pth").write_text("\n".join(ours))
    return python


def texts() -> Iterator[Finding]:
    """Version, changelog, tag and working tree agree."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    found = {
        "fastkd/__init__.py": r'__version__ = "(.*)"',
        "CITATION.cff": r"(?m)^version: (.*)$",
    }
    other = {name: match[1] for name, pattern in found.items()
             if (match := re.search(pattern, (ROOT / name).read_text()))}  # fmt: skip
    yield "version", set(other.values()) == {version}, f"{version} in pyproject.toml, {other}"
    parts = re.split(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text())
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    waiting = len(re.findall(r"(?m)^- ", sections.get("Unreleased", "")))
    detail = f"sections {', '.join(sections)}; {waiting} lines under Unreleased"
    yield "changelog", version in sections and not waiting, detail
    git = ("git", "-C", ROOT)
    head = run(*git, "rev-parse", "HEAD", cwd=ROOT).strip()
    tagged = run(*git, "for-each-ref", f"refs/tags/v{version}", "--format=%(objectname)", cwd=ROOT)
    tagged = tagged.strip()
    yield "tag", tagged in ("", head), f"v{version} is {tagged or 'not made yet'}, HEAD is {head}"
    changed = run(*git, "status", "--short", cwd=ROOT).splitlines()
    yield "tree", not changed, f"{len(changed)} files differ from HEAD"


def build(place: Path) -> tuple[Path, Path]:
    """The source distribution of the working tree, and the wheel made of that alone."""
    copy_source(place / "source")
    code = "from setuptools import build_meta; build_meta.build_sdist('../dist')"
    run(sys.executable, "-c", code, cwd=place / "source")
    (source,) = (place / "dist").glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps")
    run(*pip, "--wheel-dir", place / "dist", source, cwd=place)
    (wheel,) = (place / "dist").glob("*.whl")
    return source, wheel


def contents(source: Path | None, wheel: Path) -> Iterator[Finding]:
    """What is in both, and how much."""
    packed = {wheel: set(zipfile.ZipFile(wheel).namelist())}
    wanted = {wheel: IN_WHEEL}
    if source:
        with tarfile.open(source) as archive:
            packed[source] = {name.partition("/")[2] for name in archive.getnames()}
        wanted[source] = IN_SOURCE
    for path, names in packed.items():
        missing = wanted[path] - names
        tests = sorted(n for n in names if re.match(r"(tests|tools)/|.*/results/", n))
        licensed = any(name.endswith("LICENSE") for name in names)
        kind = "wheel" if path == wheel else "sdist"
        yield (
            f"{kind} contents",
            not missing and not tests and licensed,
            (
                f"{len(names)} files, missing {sorted(missing)}, not wanted {tests[:3]}, "
                f"{'with' if licensed else 'without'} the licence"
            ),
        )
        size = path.stat().st_size
        yield f"{kind} size", size < MOST_BYTES, f"{size / 1e6:.2f} MB, {path.name}"


def symbols(library: bytes) -> dict[str, set[str]]:
    """The versions of each library's symbols that a shared library asks for."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)(?=\0)", library):
        found.setdefault(name.decode(), set()).add(version.decode())
    return found


def allowed() -> dict[str, list[str]]:
    """The versions that the oldest systems have on which torch's own wheels run."""
    import auditwheel.policy

    table = Path(auditwheel.policy.__file__).with_name("manylinux-policy.json")
    (policy,) = (entry for entry in json.loads(table.read_text()) if entry["name"] == POLICY)
    return policy["symbol_versions"][platform.machine()]


def linux(wheel: Path, allowed: dict[str, list[str]]) -> Iterator[Finding]:
    """Whether the wheel runs there."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                asked = symbols(archive.read(name))
                newer = [
                    f"{library}_{version}"
                    for library, versions in sorted(asked.items())
                    for version in sorted(versions - set(allowed[library]))
                ]
                detail = (
                    f"{name} asks for {', '.join(newer)}: wheels.yml builds with older libraries"
                )
                yield POLICY, not newer, detail if newer else f"{name} asks for no more"


def installed(wheel: Path, place: Path) -> Iterator[Finding]:
    """The wheel at work, in an empty folder."""
    python = environment(place / "environment")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel)
    run(*pip, cwd=place)
    empty = place / "empty"
    empty.mkdir()
    for name, words in (("doctor", []), ("demo", ["--fast", "--out", "demo"])):
        try:
            said = run(python, "-m", "fastkd", name, *words, cwd=empty, HF_HUB_OFFLINE="1")
            yield name, True, said.strip().splitlines()[-1]
        except RuntimeError as error:
            yield name, False, str(error).strip()[-500:]


PARTS = ("texts", "contents", "linux", "installed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="check this one instead of building it")
    parser.add_argument("--only", default=",".join(PARTS), help="some of %(default)s")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        place, source, wheel = Path(folder), None, options.wheel
        if wheel is None:
            print("building the source distribution, and the wheel from it ...", flush=True)
            source, wheel = build(place)
        parts = {
            "texts": texts,
            "contents": lambda: contents(source, wheel),
            "linux": lambda: linux(wheel, allowed()),
            "installed": lambda: installed(wheel, place),
        }
        for part in options.only.split(","):
            for name, fine, detail in parts[part]():
                failed += not fine
                print(f"{'ok     ' if fine else 'MISSING'} {name}: {detail}", flush=True)
    print(f"{failed} of a release's needs are missing" if failed else "nothing is missing")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
