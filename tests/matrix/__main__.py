"""The suite's core against another torch: `make test-torch VERSION=2.15.0`.

Makes an environment in ``.venv-torch-VERSION``: that torch without its CUDA packages (`cuda_stubs`
lets it be imported), the Triton it asks for, transformers of the wanted version, and the wheel of
fastkd built by this interpreter's torch. The tests run from a copy, so that the wheel is what they
import. The outcome goes into ``docs/versions.json``, from which ``docs/versions.md`` is made.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path

from fastkd._losses import LOSSES
from tests.matrix import cuda_stubs

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "versions.json"
CUDA = re.compile(r"(cuda|nvidia)-", re.IGNORECASE)
EXTRAS = ["setuptools", "pytest", "pytest-xdist", "hypothesis"]
TRAIN = ["datasets", "accelerate", "scikit-learn", "scipy", "matplotlib", "rich", "typer"]
CORE = [
    *(f"tests/test_{loss.name}.py" for loss in LOSSES),
    "tests/test_extension.py",
    "tests/test_numerics.py",
    "tests/test_promises.py",
    "tests/test_fuzz.py",
    "tests/kernels",
    "tests/distill",
]


def environment(version: str, transformers: str | None) -> Path:
    """The Python of an environment with this torch; made once."""
    folder = ROOT / f".venv-torch-{version}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", f"torch=={version}"], check=True)
    info = next(folder.glob("lib/python*/site-packages/torch-*.dist-info/METADATA"))
    needs = _without_cuda(info)
    print("stubs:", *cuda_stubs.make(info.parents[1] / "torch" / "lib"))
    numpy = ["numpy<2.4"] if _older(version, "2.11") else ["numpy"]  # Triton 3.6's interpreter
    packages = [*needs, *numpy, *EXTRAS, *TRAIN]
    packages.append(f"transformers=={transformers}" if transformers else "transformers>=5")
    subprocess.run([*pip, *packages], check=True)
    return python


def _without_cuda(info: Path) -> list[str]:
    """Take the CUDA packages off torch's own list, and return the rest of it."""
    lines = info.read_text().splitlines(keepends=True)
    kept = [
        line
        for line in lines
        if not (line.startswith("Requires-Dist: ") and CUDA.match(line.split()[1]))
    ]
    info.write_text("".join(kept))
    needs = [line.removeprefix("Requires-Dist: ").strip() for line in kept if "Dist: " in line]
    return [need for need in needs if "extra ==" not in need]


def _older(version: str, than: str) -> bool:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", text)[:2]]

    return numbers(version) < numbers(than)


def build_wheel(folder: Path) -> Path:
    """The package's wheel, built with the torch of this interpreter."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", folder, ROOT], check=True)
    return next(folder.glob("fastkd-*.whl"))


def run_core(python: Path, tests: list[str], jobs: str) -> tuple[str, int]:
    """The suite's last line and exit status, from a copy without the package's source."""
    with tempfile.TemporaryDirectory() as place:
        wheel = build_wheel(Path(place))
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"]
        subprocess.run([*install, wheel], check=True)
        for name in ("tests", "bench", "kernels", "csrc", "docs"):
            shutil.copytree(ROOT / name, Path(place, name), ignore=shutil.ignore_patterns("*.pyc"))
        for name in ("pyproject.toml", "setup.py", "README.md"):
            shutil.copy(ROOT / name, place)
        variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        variables.pop("PYTHONPATH", None)
        command = [python, "-m", "pytest", "-n", jobs, "-rf", "--tb=short", *tests]
        done = subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True)
    print(done.stdout[-20_000:], done.stderr[-2_000:])
    return (done.stdout.strip().splitlines() or ["nothing"])[-1], done.returncode


def versions(python: Path) -> dict[str, str]:
    names = ("torch", "triton", "transformers", "numpy")
    code = f"from importlib.metadata import version; print(*map(version, {names!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(names, found.stdout.split(), strict=True))


def record(outcome: dict[str, str]) -> None:
    """Keep the outcome, one a combination of versions, and write the table."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    key = ("torch", "transformers", "python")
    rows = [row for row in rows if any(row[k] != outcome[k] for k in key)] + [outcome]
    rows.sort(key=lambda row: [[int(n) for n in re.findall(r"\d+", row[k])] for k in key])
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    columns = ("torch", "triton", "transformers", "numpy", "python", "wheel built with", "result")
    lines = [
        "# Versions",
        "",
        "What the suite's core printed with each torch, by `make test-torch`; one wheel.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(row[c] for c in columns) + " |" for row in rows),
    ]
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("version", help="of torch")
    parser.add_argument("--transformers", help="its version; the newest if not given")
    parser.add_argument("--jobs", default="auto", help="processes of pytest")
    parser.add_argument("--no-record", action="store_true", help="leave docs/versions.* alone")
    parser.add_argument("--tests", nargs="+", default=CORE)
    options = parser.parse_args()
    python = environment(options.version, options.transformers)
    tests = [test for test in options.tests if (ROOT / test.split("::")[0]).exists()]
    line, status = run_core(python, tests, options.jobs)
    outcome = versions(python) | {
        "python": ".".join(map(str, sys.version_info[:3])),
        "wheel built with": f"torch {metadata.version('torch')}",
        "result": line.strip("= "),
    }
    if not options.no_record:
        record(outcome)
    print(outcome)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
