"""`make check`: a fast part of the tests, for use while changing code.

One set of parameters for each test and backend, in files that do not train, start processes or
compile for long; files that read the sources run with all parameters. `make test` runs everything.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Not part of the core, which tools/versions.py runs too.
LEFT_OUT = {
    "tests/test_install.py": "builds wheels of its own",
    "tests/test_house.py": "reads the sources, not the package",
    "tests/test_docs.py": "reads the checkout, not the package",
    "tests/test_site.py": "reads the checkout, not the package",
    "tests/tools": "is about the tools",
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
    "tests/distill/test_loops.py": "compiles whole models",
    "tests/distill/test_any_loop.py": "a page of the docs, whose parts are tested",
    "tests/cli/test_processes.py": "minutes of training in many processes",
    "tests/study": "minutes of training",
    "tests/test_examples.py": "wants packages of its own",
}
# Words in the names of tests that take minutes.
SLOW = "inductor or repeated_layer or number_of_threads or edges"
# Run with all parameters, which are files, commands and names.
WHOLE = ("tests/test_house.py", "tests/test_docs.py", "tests/test_contract.py")
# Left out by `make check` only: tests that train, and below tests that compile.
TRAINS = (
    "tests/cli", "tests/train/tasks", "tests/train/test_lora.py", "tests/integrations",
    "tests/distill/test_trainer.py", "tests/test_examples.py",
    "tests/analysis/test_pictures.py", "tests/study/test_study.py", "tests/study/test_grid.py",
)  # fmt: skip
COMPILES = "compiles or compiled or dynamic_graph or tensor_twice or one_graph or graphs or sizes"
PROCESSES = "ddp or process or sharded or parallel or split_steps"


def copy_source(place: Path, root: Path = ROOT) -> None:
    """Copy the files that git tracks or does not ignore; symbolic links stay links."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=root, text=True).splitlines():
        if (root / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, place / name, follow_symlinks=False)


def main() -> None:
    processes = str(len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "pytest", "-n", processes, "--dist", "worksteal"]
    command += ["-p", "tools.spread", "-m", "not slow"]
    command += ["-k", f"not ({SLOW} or {COMPILES} or {PROCESSES})"]
    command += [f"--ignore={path}" for path in (*LEFT_OUT, *TRAINS) if path not in WHOLE]
    command += [f"--whole={path}" for path in WHOLE]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    raise SystemExit(subprocess.call([*command, *sys.argv[1:]], cwd=ROOT, env=variables))


if __name__ == "__main__":
    main()
