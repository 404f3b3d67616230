"""The suite's core against another torch: `make test-torch VERSION="2.10.0 2.15.0"`.

One wheel is built by this interpreter's torch. For each version an environment is made in
``.venv-torch-VERSION``: that torch without its CUDA packages (`cuda_stubs` lets it be imported),
the Triton it asks for, the wheel and what it needs. The tests run from a copy without the package's
source, so that the wheel is what they import. The outcome goes into ``docs/versions.json``, from
which ``docs/versions.md`` is made.
"""

import argparse
import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from tools.versions import cuda_stubs, table

ROOT = Path(__file__).parents[2]
CUDA = re.compile(r"(cuda|nvidia)-", re.IGNORECASE)
# The core is every test but these, with few parameters each (`spread`).
LEFT_OUT = {
    "tests/test_install.py": "builds wheels of its own",
    "tests/test_house.py": "reads the sources, not the package",
    "tests/test_docs.py": "reads the checkout, not the package",
    "tests/test_site.py": "reads the checkout, not the package",
    "tests/tools": "is about this",
    "tests/bench": "benchmarks are run in the development environment",
    "tests/kernels/test_compile.py": "GPU code: compiled with one Triton",
    "tests/test_dry_cuda.py": "a mocked driver, made for one Triton",
    "tests/cli/test_kills.py": "about files, not versions",
    "tests/cli/test_abuse.py": "about options and files, not versions",
    "tests/cli/test_cli.py": "minutes of training",
    "tests/cli/test_demo.py": "minutes of training",
    "tests/train/test_arrow_rows.py": "about memory, not versions",
    "tests/cli/test_display.py": "about terminals, not versions",
    "tests/distill/test_verify.py": "starts many processes",
    "tests/distill/test_several.py": "starts many processes",
    "tests/distill/test_loops.py": "compiles whole models",
    "tests/distill/test_any_loop.py": "a page of the docs, whose parts are tested",
    "tests/cli/test_processes.py": "minutes of training in many processes",
    "tests/study": "minutes of training",
    "tests/test_examples.py": "wants packages of its own",
}
# And those with such names, which take minutes.
SLOW = "inductor or repeated_layer or number_of_threads or edges"


def environment(version: str, transformers: str | None, python: Path, wheel: Path) -> Path:
    """The Python of an environment with this torch and the wheel; made once."""
    code = "import sys; print(*sys.version_info[:2], sep='.')"
    number = subprocess.check_output([python, "-c", code], text=True).strip()
    folder = ROOT / f".venv-torch-{version}-py{number}"
    inside = folder / "bin" / "python"
    pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not inside.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        subprocess.run([*pip, "--no-deps", f"torch=={version}"], check=True)
        info = next(folder.glob("lib/python*/site-packages/torch-*.dist-info/METADATA"))
        take_cuda_off(info)
        print("stubs:", *cuda_stubs.make(info.parents[1] / "torch" / "lib"))
    packages = [f"torch=={version}", f"fastkd[test] @ {wheel.as_uri()}", "setuptools>=77"]
    packages += [f"transformers=={transformers}"] if transformers else []
    packages += (
        ["numpy<2.4"] if table.numbers(version) < (2, 11) else []
    )  # Triton 3.6's interpreter
    subprocess.run([*pip, *packages], check=True)
    # pip takes a wheel of the same version for the one that is there.
    subprocess.run([*pip, "--no-deps", "--force-reinstall", wheel], check=True)
    return inside


def take_cuda_off(info: Path) -> None:
    lines = info.read_text().splitlines(keepends=True)
    info.write_text(
        "".join(
            line
            for line in lines
            if not (line.startswith("Requires-Dist: ") and CUDA.match(line.split()[1]))
        )
    )


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True)


def copy_source(place: Path) -> None:
    """What git knows of the working tree; symbolic links stay links."""
    for name in _git("ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name, follow_symlinks=False)


def build_wheel(source: Path) -> Path:
    """The package's wheel, built with the torch of this interpreter; the same bits for a commit."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    when = {"SOURCE_DATE_EPOCH": _git("show", "-s", "--format=%ct", "HEAD").strip()}
    subprocess.run(
        [*command, "--wheel-dir", source / "dist", source], check=True, env=os.environ | when
    )
    return next((source / "dist").glob("fastkd-*.whl"))


def run_core(python: Path, place: Path, tests: list[str], jobs: str) -> tuple[str, int]:
    """The suite's last line and exit status."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {"TRITON_CACHE_DIR": str(place / "triton")}
    variables.pop("PYTHONPATH", None)
    command = [python, "-m", "pytest", "-n", jobs, "--dist", "worksteal", "-rfE", "--tb=short"]
    command += [*(f"--ignore={name}" for name in LEFT_OUT), "-k", f"not ({SLOW})"]
    lines = ["nothing"]
    with subprocess.Popen(
        [*command, *tests], cwd=place, env=variables, stdout=subprocess.PIPE, text=True
    ) as pytest:
        for line in pytest.stdout or ():
            print(line, end="", flush=True)
            lines += [line.strip()] if line.strip() else []
    return lines[-1], pytest.returncode


def versions(python: Path) -> table.Row:
    code = (
        "import platform, importlib.metadata as m; print(*map(m.version, "
        f"{table.PACKAGES!r}), platform.python_version())"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip((*table.PACKAGES, "python"), found.stdout.split(), strict=True))


def provenance(wheel: Path) -> table.Row:
    """What the wheel was made from, and when."""
    return {
        "built with": f"torch {metadata.version('torch')}",
        "wheel": hashlib.sha256(wheel.read_bytes()).hexdigest()[:12],
        "commit": _git("rev-parse", "--short", "HEAD").strip(),
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("version", nargs="+", help="of torch")
    parser.add_argument("--transformers", help="its version; the newest if not given")
    parser.add_argument("--python", type=Path, default=sys.executable, help="another interpreter")
    parser.add_argument("--wheel", type=Path, help="built before; nothing is recorded")
    parser.add_argument("--jobs", default="auto", help="processes of pytest")
    parser.add_argument("--most", type=int, default=1, help="parameters of a test and backend")
    parser.add_argument("--no-record", action="store_true", help="leave docs/versions.* alone")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="paths; options go to pytest")
    options, others = parser.parse_known_args()
    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        copy_source(place)
        wheel = options.wheel.resolve() if options.wheel else build_wheel(place)
        made = {} if options.wheel else provenance(wheel)
        shutil.rmtree(place / "fastkd")
        for version in options.version:
            python = environment(version, options.transformers, options.python, wheel)
            others += ["-p", "tools.spread", f"--most={options.most}"]
            line, status = run_core(python, place, [*options.tests, *others], options.jobs)
            outcome = versions(python) | {"parameters": options.most} | table.counts(line)
            print(outcome)
            worst = max(worst, status)
            if not (options.no_record or options.wheel):
                table.record(outcome | made)
    raise SystemExit(worst)


if __name__ == "__main__":
    main()
