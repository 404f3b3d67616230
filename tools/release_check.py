"""`make release-check`: checks before a release; exit status 1 if one fails.

It builds the source distribution and from that the wheel (or reads `--wheel`), checks the contents
of both, checks the wheel's platform by auditwheel, compiles the extension by clang for several
systems, and installs the wheel into a new environment with this one's packages, where `fastkd
doctor` and a short demo run. It uploads and tags nothing.
"""

import argparse
import importlib.util
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

import setup as recipe
from tools.check import copy_source

ROOT = Path(__file__).resolve().parents[1]
POLICY = "manylinux_2_28"  # as torch's own
MOST_BYTES = 3_000_000
# Systems that the package ziglang, a clang with their headers, compiles for.
TARGETS = ("x86_64-linux-gnu.2.28", "aarch64-linux-gnu.2.28", "aarch64-macos")
IN_WHEEL = {
    "fastkd/py.typed", "fastkd/kernels/relation.py", "fastkd/_C.abi3.so",
    "fastkd/study/report.html.jinja", "fastkd/train/card.md.in",
}  # fmt: skip
IN_SOURCE = {
    "csrc/linalg/roots.cpp",
    "csrc/linalg/roots.cu",
    "LICENSE",
    "README.md",
    "fastkd/kernels/relation.py",
}
Finding = tuple[str, bool, str]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Output of a command; the error if the command fails."""
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


def seconds() -> float:
    """Processor time of finished child processes."""
    times = os.times()
    return times.children_user + times.children_system


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
    """The source distribution of the working tree, and the wheel built from it."""
    copy_source(place / "source")
    code = "from setuptools import build_meta; build_meta.build_sdist('../dist')"
    run(sys.executable, "-c", code, cwd=place / "source")
    (source,) = (place / "dist").glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps")
    run(*pip, "--wheel-dir", place / "dist", source, cwd=place)
    (wheel,) = (place / "dist").glob("*.whl")
    return source, wheel


def contents(source: Path | None, wheel: Path) -> Iterator[Finding]:
    """Content and sizes of source distribution and wheel."""
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


def linux(wheel: Path) -> Iterator[Finding]:
    """Whether the wheel runs on the oldest systems on which torch's own do, by auditwheel."""
    from auditwheel.wheel_abi import analyze_wheel_abi

    torch = frozenset({"libtorch*.so", "libc10*.so"})  # loaded from where torch is
    found = analyze_wheel_abi(
        None, None, wheel, torch, disable_isa_ext_check=False, allow_graft=False
    )
    wanted = found.policies.get_policy_by_name(f"{POLICY}_{platform.machine()}")
    said = found.overall_policy.name
    yield POLICY, not found.overall_policy < wanted, f"auditwheel says {said}"


def clang(place: Path) -> Iterator[Finding]:
    """The extension's files compiled by clang, without a warning."""
    if importlib.util.find_spec("ziglang") is None:
        yield "clang", False, "the package ziglang is not installed"
        return
    torch, _ = recipe.find_torch() or (Path(), "")
    folders = (torch / "include", sysconfig.get_paths()["include"])
    options = [*recipe.COMPILE_ARGS, "-fPIC", "-Wall", "-Wextra", "-Werror", "-Qunused-arguments"]
    options += [f"-D{name}={value}" for name, value in recipe.MACROS]
    options += ["-Icsrc", *(f"-isystem{folder}" for folder in folders)]
    for target in TARGETS:
        before = seconds()
        try:
            for source in sorted((ROOT / "csrc").rglob("*.cpp")):
                zig = (sys.executable, "-m", "ziglang", "c++", "-target", target, *options)
                path = os.environ.get("PYTHONPATH", "")
                run(*zig, "-c", source, "-o", place / "object.o", cwd=ROOT, PYTHONPATH=path)
        except RuntimeError as error:
            yield f"clang {target}", False, str(error).strip()[-500:]
        else:
            yield f"clang {target}", True, f"{seconds() - before:.0f} s of processor time"


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


PARTS = ("texts", "contents", "linux", "clang", "installed")


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
            print(f"{seconds():.0f} s of processor time")
        parts = {
            "texts": texts,
            "contents": lambda: contents(source, wheel),
            "linux": lambda: linux(wheel),
            "clang": lambda: clang(place),
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
