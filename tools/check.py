"""What a change needs while it is made: `make check`.

Each test once a backend, of the files that neither train, nor start processes, nor compile for
long; of what reads the sources, all. `make test` has the rest, and every parameter.
"""

import os
import subprocess
import sys
from pathlib import Path

from tools.versions.__main__ import LEFT_OUT, SLOW

ROOT = Path(__file__).parents[1]
# Their parameters are files, commands and names, in any of which a change may be.
WHOLE = ("tests/test_house.py", "tests/test_docs.py", "tests/test_contract.py")
# Beside what versions of torch go without: what trains, and what compiles.
TRAINS = (
    "tests/cli", "tests/train/tasks", "tests/train/test_lora.py", "tests/integrations",
    "tests/distill/test_trainer.py", "tests/distill/test_one_curve.py", "tests/test_examples.py",
    "tests/analysis/test_pictures.py", "tests/study/test_study.py", "tests/study/test_tasks.py",
)  # fmt: skip
COMPILES = "compiles or compiled or dynamic_graph or tensor_twice or one_graph or graphs or sizes"
PROCESSES = "ddp or process or sharded or parallel or split_steps"


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
