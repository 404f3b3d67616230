"""The suite's core in an environment with other versions: `make test-torch VERSION=2.15.0`.

    python -m tools.versions 2.15.0 [--python python3.13] [--transformers 5.23.0] [--wheel FILE]

The wheel is built by this interpreter's torch and installed in ``.venv-torch-VERSION``. The tests
run from a copy without the package's source, so that they import the wheel.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.check import LEFT_OUT, ROOT, SLOW, copy_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("version", help="of torch")
    parser.add_argument("--transformers", help="its version; the newest if not given")
    parser.add_argument("--python", default=sys.executable, help="another interpreter")
    parser.add_argument("--wheel", type=Path, help="built before")
    options, others = parser.parse_known_args()
    folder = ROOT / f".venv-torch-{options.version}"
    python = folder / "bin" / "python"
    with tempfile.TemporaryDirectory() as copy:
        source = Path(copy)
        copy_source(source)
        build = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
        if options.wheel is None:
            subprocess.run([*build, "--wheel-dir", source / "dist", source], check=True)
        wheel = (options.wheel or next((source / "dist").glob("*.whl"))).resolve()
        shutil.rmtree(source / "fastkd")
        subprocess.run([options.python, "-m", "venv", folder], check=True)
        packages = [f"torch=={options.version}", f"fastkd[test] @ {wheel.as_uri()}"]
        packages += [f"transformers=={options.transformers}"] if options.transformers else []
        subprocess.run([python, "-m", "pip", "install", *packages, "setuptools>=77"], check=True)
        command = [python, "-m", "pytest", "-p", "tools.spread", "-k", f"not ({SLOW})", "-n", "2"]
        command += [*(f"--ignore={name}" for name in LEFT_OUT), "tests", *others]
        variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        raise SystemExit(subprocess.run(command, cwd=source, env=variables).returncode)


if __name__ == "__main__":
    main()
