"""The hub's projects as its package `kernels` loads them, and their tests: `make release-check`.

    python tools/hub/check.py hub    # where kernels, torch, triton and pytest are, and fastkd isn't

Takes the place of the hub's builder: lays out one variant of each for the CPU, names its operators,
and compiles the roots against PyTorch's stable ABI.
"""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

FILES = Path(__file__).parent / "files"


def lay_out(project: Path, name: str, variant: str, load: str = "") -> Path:
    """The package in build/, as the operators ``name``."""
    package = project.name.replace("-", "_")
    folder = project / "build" / variant
    shutil.copytree(project / "torch-ext" / package, folder)
    # As the builder does: an operator's namespace is a kernel's name, backend and commit.
    ops = (FILES / "ops.py.in").read_text()
    (folder / "_ops.py").write_text(ops.format(name=name, load=load))
    about = {"name": project.name, "id": name, "version": 0, "license": "apache-2.0"}
    about |= {"backend": {"type": "cpu"}, "python-depends": []}
    about |= {"digest": {"algorithm": "sha256", "files": {}}}
    (folder / "metadata.json").write_text(json.dumps(about))
    return folder


def kernels_for_the_cpu(project: Path) -> Path:
    return lay_out(project, "_fastkd_kernels_cpu_0a1b2c3", "torch-cpu")


def roots_for_the_cpu(project: Path, *flags: str) -> Path:
    """Compiled, with ``flags`` last."""
    name = "_fastkd_roots_cpu_0a1b2c3"
    machine, system = platform.machine(), platform.system().lower()
    variant = f"torch-stable-abi210-cpu-{machine}-{system}"
    folder = lay_out(project, name, variant, f"\nfrom . import {name}  # registers them\n")
    shutil.copy(FILES / "registration.h", project / "build")
    installed = Path(torch.__file__).parent
    command = [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-std=c++17", "-fopenmp-simd"]
    command += ["-O3", "-fno-math-errno", "-fvisibility=hidden", "-DCPU_KERNEL"]
    command += [f"-DTORCH_EXTENSION_NAME={name}", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    command += ["-DPy_LIMITED_API=0x03090000", f"-I{sysconfig.get_paths()['include']}"]
    command += [f"-I{installed / 'include'}", f"-I{project / 'roots'}", f"-I{project / 'build'}"]
    sources = "torch-ext/torch_binding.cpp", "roots/linalg/roots.cpp"
    command += [str(project / source) for source in sources]
    command += [f"-L{installed / 'lib'}", "-ltorch_cpu", *flags]
    subprocess.run([*command, "-o", str(folder / f"{name}.abi3.so")], check=True)
    return folder


def run_tests(project: Path, module: ModuleType, device: torch.device) -> int:
    """How many tests of its own a project has; they pass."""
    given = ModuleType("kernels")
    given.get_kernel = lambda *args, **options: module  # type: ignore[attr-defined]
    (path,) = (project / "tests").glob("test_*.py")
    with mock.patch.dict(sys.modules, {"kernels": given}):
        # The builder's own marker.
        source = path.read_text().replace("@pytest.mark.kernels_ci\n", "")
        names: dict = {}
        exec(compile(source, str(path), "exec"), names)
    tests = [test for name, test in names.items() if name.startswith("test_")]
    for test in tests:
        test(device)
    return len(tests)


def main(hub: Path) -> None:
    assert importlib.util.find_spec("fastkd") is None, "fastkd is here too"
    kernels = importlib.import_module("kernels")  # the hub's, not this repository's folder
    roots, rest = hub / "fastkd-roots", hub / "fastkd-kernels"
    roots_for_the_cpu(roots)
    kernels_for_the_cpu(rest)
    for project in (roots, rest):
        module = kernels.get_local_kernel(project)
        count = run_tests(project, module, torch.device("cpu"))
        print(f"{project.name}: {len(module.__all__)} functions, {count} tests pass", end="; ")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
