"""Every way of installing, each in a fresh environment with this environment's torch.

`make test` itself covers the editable install of the checkout.
"""

import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import setuptools
import torch

import fastkd
import setup as recipe
from fastkd._core import extension
from tools.check import copy_source

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git lists what to copy"),
]

# Label of this torch's extension in the version of a wheel.
LABEL = "cu" + torch.version.cuda.replace(".", "") if torch.version.cuda else "cpu"

CHECK = """
import torch, fastkd, fastkd.kernels
from fastkd.linalg import roots
from fastkd._core import extension
a = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
r = roots.sqrtm(a)
assert torch.allclose(r @ r, a), r
print("extension", extension.CPU, fastkd.__file__)
"""


def run(*command: str | Path, cwd: Path, expect: int = 0, **environment: str) -> str:
    """Output of the command; the test fails with it if the command ends otherwise."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FASTKD_NO_EXT")}
    env |= {"OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == expect, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of the checkout without build outputs; symbolic links stay links."""
    copy_source(tmp_path / "source")
    return tmp_path / "source"


def environment(path: Path, with_torch: bool = True) -> Path:
    """Interpreter of a new environment with this environment's packages, or only setuptools.

    Through a .pth file, in which this environment's own .pth files, fastkd's editable install
    among them, do not count.
    """
    venv.create(path, with_pip=False, symlinks=True)
    python = path / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(run(python, "-c", code, cwd=path).strip())
    if with_torch:
        paths = {sysconfig.get_paths()[key] for key in ("purelib", "platlib")}
        (site / "test.pth").write_text("\n".join(paths))
    else:
        ours = Path(setuptools.__file__).parents[1]
        for part in (*ours.glob("setuptools*"), ours / "_distutils_hack"):
            (site / part.name).symlink_to(part)
    return python


def installed(python: Path, cwd: Path) -> list[str]:
    """Whether the package that an environment has is built, and its file."""
    return run(python, "-c", CHECK, cwd=cwd).strip().splitlines()[-1].split()[1:]


def pip(python: Path, command: str, *what: str | Path, cwd: Path, **variables: str) -> str:
    """Run this environment's pip for another; only build tools are read from an index."""
    options = ("--no-deps", "--disable-pip-version-check", "-v")
    start = (sys.executable, "-m", "pip", "--python", python, command)
    return run(*start, *options, *what, cwd=cwd, **variables)


@pytest.fixture
def in_haste(tmp_path) -> dict[str, str]:
    """Compilers that read all headers and link to what this environment built from the sources."""
    compilers = {}
    for name, usual in (("CC", "cc"), ("CXX", "c++")):
        compiler = tmp_path / name
        compiler.write_text(f"""#!/bin/sh
case " $* " in *" -c "*) exec {os.environ.get(name, usual)} "$@" -E;; esac
while [ "$1" != -o ]; do shift; done
exec cp {fastkd._C.__file__} "$2"
""")
        compiler.chmod(0o755)
        compilers[name] = str(compiler)
    return compilers


@pytest.mark.skipif(not extension.CPU, reason="fastkd._C is not built")
def test_extension_uses_only_the_stable_abi_of_torch(tmp_path):
    """The binary then works with every torch."""
    undefined = run("nm", "-D", "--undefined-only", fastkd._C.__file__, cwd=tmp_path)
    assert "aoti_torch" in undefined
    assert not re.findall(r"_ZN\w*(?:2at|3c10|5torch)\w*", undefined)


@pytest.mark.skipif(not extension.CPU, reason="fastkd._C is not built")
def test_sdist_builds_a_wheel_that_installs(source, tmp_path, in_haste):
    """torch is no build requirement; its headers are read from the environment."""
    python = environment(tmp_path / "env")
    code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    run(python, "-c", code, cwd=source)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    sources = {str(path.relative_to(source)) for path in (source / "csrc").rglob("*.*")}
    assert {"fastkd/kernels/projection.py", "csrc/linalg/roots.cu", *sources} <= names
    assert not [name for name in names if name.startswith("tests/")], "a few, without their helpers"

    home = "https://example.org/fastkd"
    words = "wheel", "-w", tmp_path, sdist
    pip(python, *words, cwd=tmp_path, FASTKD_LABEL=LABEL, FASTKD_HOME=home, **in_haste)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"fastkd-[\d.]+\+{LABEL}-cp310-abi3-\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {"fastkd/_C.abi3.so", "fastkd/kernels/projection.py"} <= set(names)
        (metadata,) = (n for n in names if n.endswith("/METADATA"))
        page = archive.read(metadata).decode()
    assert f"Project-URL: Homepage, {home}\n" in page and page.count("Project-URL: ") == 4
    links = re.findall(r"\]\(([^)\s]+)\)", page.partition("\n\n")[2])
    assert all(link.startswith(("https://", "#")) for link in links)
    ours = [link.split("/v", 1) for link in links if link.startswith(home)]
    assert f"{home}/raw/" in page and len(ours) > 15
    assert all((source / path.partition("/")[2].partition("#")[0]).exists() for _, path in ours)
    pip(python, "install", wheel, cwd=tmp_path)
    built, file = installed(python, tmp_path)
    assert built == "True" and tmp_path / "env" in Path(file).parents


def test_install_without_torch_or_a_compiler(source, tmp_path):
    """The package installs without its extension, if the environment says so or has no compiler."""
    bare = environment(tmp_path / "bare", with_torch=False)
    words = "wheel", "--no-build-isolation", "-w", tmp_path, source
    with pytest.raises(AssertionError, match="no torch here to build the extension with"):
        pip(bare, *words, cwd=tmp_path)
    output = pip(bare, *words, cwd=tmp_path, FASTKD_NO_EXT="1")
    assert "FASTKD_NO_EXT=1, building without the extension" in output
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")

    python, words = environment(tmp_path / "env"), ("install", "--no-build-isolation", source)
    nowhere = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    with pytest.raises(AssertionError, match="It needs g\\+\\+ from version 9 on") as failure:
        pip(python, *words, cwd=tmp_path, FASTKD_REQUIRE_EXT="1", **nowhere)
    assert "FASTKD_NO_EXT=1 installs fastkd without the extension" in str(failure.value)
    output = pip(python, *words, cwd=tmp_path, **nowhere)
    assert "fastkd is installed without fastkd._C, and runs on slower PyTorch code" in output
    assert installed(python, tmp_path)[0] == "False"
    doctor = run(python, "-m", "fastkd", "doctor", cwd=tmp_path)
    assert "fastkd._C is not built; matrix roots and row kernels run on PyTorch code" in doctor


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64's")
@pytest.mark.parametrize("version", [9, 10, 12])
def test_instructions_unknown_to_the_compiler_are_left_out(version):
    """gcc has AMX from version 11 and avx512_bf16 from version 10; fastkd uses both or neither."""
    torch_headers = Path(torch.__file__).parent / "include"
    command = ["g++", *recipe.COMPILE_ARGS[:1], "-E", "-dM", "-U__GNUC__", f"-D__GNUC__={version}"]
    command += [f"-D{name}={value}" for name, value in recipe.MACROS]
    macros = run(*command, "-Icsrc", f"-I{torch_headers}", "csrc/linalg/half_product.cpp", cwd=ROOT)
    assert ("#define FASTKD_TILES" in macros) == (version >= 11)
    assert ("#define FASTKD_VECTORS" in macros) == (version >= 11)


def test_setup_py_of_other_tools(tmp_path):
    """A free-threaded Python, whose headers refuse the limited API; a wrong label; an old tool."""
    code = (
        "import runpy, sysconfig; "
        "sysconfig.get_config_var = lambda name: name == 'Py_GIL_DISABLED'; "
        "found = runpy.run_path('setup.py'); "
        "print(dict(found['MACROS']).keys(), *(e.py_limited_api for e in found['extensions']()))"
    )
    output = run(sys.executable, "-c", code, cwd=ROOT)
    assert "Py_LIMITED_API" not in output and "False" in output
    assert "Py_LIMITED_API" in dict(recipe.MACROS)
    words = sys.executable, "setup.py", "egg_info", "--egg-base", tmp_path
    wrong = {"FASTKD_NO_EXT": "1", "FASTKD_LABEL": "cu130"}
    output = run(*words, cwd=ROOT, expect=1, **wrong)
    assert "FASTKD_LABEL=cu130, but what is built here is none" in output
    code = "import runpy, setuptools; setuptools.__version__ = '75.8.0'; runpy.run_path('setup.py')"
    output = run(sys.executable, "-c", code, cwd=ROOT, expect=1)
    said = 'fastkd needs setuptools 77 or later, this is 75.8.0: pip install --upgrade "setuptools'
    assert output.startswith(said)
