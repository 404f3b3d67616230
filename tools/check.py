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
LEFT_OUT = (
    # They build wheels, read the checkout, are about the tools, or want packages of their own.
    "tests/test_install.py", "tests/test_house.py", "tests/test_docs.py", "tests/test_site.py",
    "tests/tools", "tests/bench", "tests/test_examples.py",
    # GPU code, compiled with one Triton.
    "tests/kernels/test_compile.py", "tests/test_dry_cuda.py",
    # About files, options, memory and terminals, not versions.
    "tests/cli/test_kills.py", "tests/cli/test_abuse.py", "tests/cli/test_display.py",
    "tests/train/test_arrow_rows.py", "tests/distill/test_any_loop.py",
    # Minutes of training, of many processes, or of compiling whole models.
    "tests/cli/test_cli.py", "tests/cli/test_demo.py", "tests/cli/test_processes.py", "tests/study",
    "tests/distill/test_verify.py", "tests/distill/test_loops.py",
)  # fmt: skip
# Words in the names of tests that take minutes.
SLOW = "inductor or repeated_layer or number_of_threads or edges"
# Run with all parameters, which are files, commands and names.
WHOLE = ("tests/test_house.py", "tests/test_docs.py", "tests/test_contract.py")
# Left out by `make check` only: tests that train, and below tests that compile.
TRAINS = (
    "tests/cli", "tests/train/tasks", "tests/train/test_lora.py", "tests/integrations",
    "tests/distill/test_trainer.py", "tests/test_examples.py",
    "tests/analysis/test_pictures.py", "tests/study/test_study.py",
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
