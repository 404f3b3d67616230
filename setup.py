"""Builds the extension ``fastkd._C``; everything declarative is in pyproject.toml.

torch is no build requirement, because a build environment of its own would download gigabytes of
it. Its headers are taken from where the package will run: this interpreter's environment, asked in
a process that does not see pip's isolated one. Without a torch there the build stops. Where the
compiler fails, the package is built without the extension and runs on PyTorch code.

Environment variables:
    FASTKD_NO_EXT=1: build without the extension.
    FASTKD_REQUIRE_EXT=1: stop where the extension can't be compiled.
    FASTKD_LABEL=cpu or cu130 (CUDA 13.0): part of the version, 0.1.0+cu130, so that two builds
        can't be confused. Where something else would be built, the build stops.
    FASTKD_HOME=https://...: address of the repository, for the package's page: links of README
        become absolute, and the metadata have addresses.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info
from setuptools.command.egg_info import egg_info
from setuptools.errors import BaseError, CCompilerError, CompileError

if int(setuptools.__version__.partition(".")[0]) < 77:
    # Older ones stop at the licence field of pyproject.toml, and say nothing of themselves.
    raise SystemExit(
        f"fastkd needs setuptools 77 or later, this is {setuptools.__version__}: "
        'pip install --upgrade "setuptools>=77"'
    )

# One binary for every torch from 2.10 and every Python from 3.10 on; a free-threaded Python has no
# limited API, so it gets a binary of its own.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")
MACROS = [("TORCH_TARGET_VERSION", "0x020a000000000000")]
MACROS += [("Py_LIMITED_API", "0x030a0000")] if LIMITED_API else []
# Without debug sections, which name the folder of the build: the same source gives the same bits.
COMPILE_ARGS = ["-std=c++17", "-O3", "-g0", "-fopenmp-simd"]
COMPILE_ARGS += ["-fno-math-errno", "-fvisibility=hidden"]
# Vectors wider than the oldest processor's registers stay inside one function, where no ABI counts.
COMPILE_ARGS += ["-Wno-psabi"]
GPU_ARCHITECTURES = ("80", "90", "100")


def find_torch() -> tuple[Path, str] | None:
    """Folder and CUDA version ("" for none) of the torch that the package will run with."""
    # An import of torch takes seconds, and what pip starts asks several times.
    code = (
        "import importlib.util, runpy; file = importlib.util.find_spec('torch').origin; "
        "version = runpy.run_path(file.replace('__init__', 'version')); "
        "print(file); print(version['cuda'] or '')"
    )
    # -I: without PYTHONPATH, by which pip hides the environment it builds for.
    for command in ([sys.executable, "-I", "-c", code], [sys.executable, "-c", code]):
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            file, cuda = answer.stdout.splitlines()[-2:]
            return Path(file).parent, cuda
    return None


def find_nvcc() -> str | None:
    """CUDA's own, or that of the package nvidia-cuda-nvcc."""
    own = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
    if own.exists():
        return str(own)
    packaged = Path(sysconfig.get_paths()["purelib"], "nvidia").glob("cu*/bin/nvcc")
    return shutil.which("nvcc") or next(map(str, packaged), None)


def extensions() -> list[Extension]:
    """The C++ part, and the CUDA part where torch has CUDA and nvcc is there."""
    if os.environ.get("FASTKD_NO_EXT") == "1":
        print("fastkd: FASTKD_NO_EXT=1, building without the extension")
        return []
    # Metadata of a source distribution needs no torch; `check_torch` stops what does.
    folder, cuda = find_torch() or (Path(), "")
    options = {
        "include_dirs": ["csrc", str(folder / "include")],
        "library_dirs": [str(folder / "lib")],
        "define_macros": MACROS,
        "py_limited_api": LIMITED_API,
        "language": "c++",
        "depends": [str(path) for path in Path("csrc").rglob("*.h")],
        "optional": not {"FASTKD_REQUIRE_EXT", "FASTKD_LABEL"} & set(os.environ),
    }
    found = [
        Extension(
            "fastkd._C",
            # The largest takes half of the time, so it comes first.
            sorted(map(str, Path("csrc").rglob("*.cpp")), key=lambda x: (-os.path.getsize(x), x)),
            libraries=["torch_cpu"],
            extra_compile_args=COMPILE_ARGS,
            **options,
        )
    ]
    if cuda and find_nvcc() is None:
        print(f"fastkd: torch has CUDA {cuda} but there is no nvcc, building the C++ part only")
    elif cuda:
        found.append(
            Extension(
                "fastkd._C_cuda", ["csrc/linalg/roots.cu"], libraries=["torch_cuda"], **options
            )
        )
    return found


def check_torch(modules: list[Extension]) -> None:
    """Stop where the extension is to be built and there is no torch to build it with."""
    if modules and find_torch() is None:
        raise SystemExit(
            "fastkd: no torch here to build the extension with. Install torch first, then fastkd: "
            'pip install torch "setuptools>=77" && pip install --no-build-isolation . '
            "(FASTKD_NO_EXT=1 pip install . installs fastkd without the extension, on slower "
            "PyTorch code)"
        )


def label(modules: list[Extension]) -> str:
    """What FASTKD_LABEL asks to add to the version, if that is what is built."""
    wanted = os.environ.get("FASTKD_LABEL", "")
    torch = find_torch() if wanted else None
    built = ["none", "cpu", "cu" + torch[1].replace(".", "") if torch else ""][len(modules)]
    if wanted and wanted != built:
        raise SystemExit(f"fastkd: FASTKD_LABEL={wanted}, but what is built here is {built}")
    return f"+{wanted}" if wanted else ""


class Labelled(egg_info):
    """A version with the label; a source distribution's setup.cfg would win over an option."""

    def finalize_options(self) -> None:
        self.tag_build = label(self.distribution.ext_modules)
        super().finalize_options()


class Metadata(dist_info):
    """Checks for torch before pip downloads what the package depends on."""

    def run(self) -> None:
        check_torch(self.distribution.ext_modules)
        super().run()


def published(readme: str, home: str, tag: str) -> str:
    """README with addresses in place of its links into the checkout; pictures as files."""

    def absolute(link: re.Match) -> str:
        kind = "raw" if link[1].endswith((".svg", ".png")) else "blob"
        return f"]({home}/{kind}/{tag}/{link[1]})"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", absolute, readme) if home else readme


def page() -> dict[str, object]:
    """Description and addresses of the package."""
    home = os.environ.get("FASTKD_HOME", "").rstrip("/")
    version = re.search(r'(?m)^version = "(.*)"', Path("pyproject.toml").read_text())[1]
    paths = {
        "Homepage": "",
        "Documentation": f"/blob/v{version}/docs/index.md",
        "Changelog": f"/blob/v{version}/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {
        "long_description": published(Path("README.md").read_text(), home, f"v{version}"),
        "long_description_content_type": "text/markdown",
        "project_urls": {name: home + path for name, path in paths.items() if home},
    }


def nvcc_command(nvcc: str, includes: list) -> list[str]:
    """All but architectures, input and output."""
    command = [nvcc, "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC"]
    command += ["-DUSE_CUDA", *(f"-D{name}={value}" for name, value in MACROS)]
    return [*command, *(f"-I{folder}" for folder in includes)]


def in_parallel(compile: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """A compiler's ``compile`` with a source a core; setuptools compiles one after the other."""

    def compile_all(sources: list[str], *arguments: object, **options: object) -> list[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = pool.map(lambda source: compile([source], *arguments, **options), sources)
            return [path for paths in made for path in paths]

    return compile_all


class BuildExtension(build_ext):
    """nvcc for .cu files, and a message that says what to do when a compiler fails."""

    def run(self) -> None:
        check_torch(self.extensions)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        try:
            for source in [s for s in ext.sources if s.endswith(".cu")]:
                ext.sources.remove(source)
                ext.extra_objects.append(self.compile_cuda(ext, source))
            with mock.patch.object(self.compiler, "compile", in_parallel(self.compiler.compile)):
                super().build_extension(ext)
        except (BaseError, CCompilerError, OSError) as error:
            reason = textwrap.shorten(str(error), 120)  # it may hold the whole command
            message = (
                f"fastkd: compiling {ext.name} failed ({reason}). It needs g++ from version 9 on, "
                "or clang (Debian, Ubuntu: apt-get install g++; CXX names another)"
            )
            if not ext.optional:
                raise SystemExit(
                    f"{message}. FASTKD_NO_EXT=1 installs fastkd without the extension, on slower "
                    "PyTorch code."
                ) from None
            # setuptools prints this as a warning and goes on.
            raise CompileError(
                f"{message}. fastkd is installed without {ext.name}, and runs on slower PyTorch "
                "code; FASTKD_REQUIRE_EXT=1 stops instead."
            ) from None

    def compile_cuda(self, ext: Extension, source: str) -> str:
        nvcc = find_nvcc()
        assert nvcc is not None
        known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
        wanted = [a for a in GPU_ARCHITECTURES if f"compute_{a}" in known.split()]
        generate = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in wanted]
        # PTX of the newest, for GPUs that came later.
        generate.append(f"-gencode=arch=compute_{wanted[-1]},code=compute_{wanted[-1]}")
        target = Path(self.build_temp, source).with_suffix(".cu.o")
        target.parent.mkdir(parents=True, exist_ok=True)
        includes = [*ext.include_dirs, sysconfig.get_paths()["include"]]
        command = [*nvcc_command(nvcc, includes), *generate, "-c", source, "-o", str(target)]
        self.spawn(command)
        toolkit = Path(nvcc).resolve().parent.parent
        ext.library_dirs += [str(toolkit / "lib64"), str(toolkit / "lib")]
        ext.libraries.append("cudart_static")
        ext.libraries += ["rt", "dl", "pthread"]
        return str(target)


if __name__ == "__main__":
    modules = extensions()
    setup(
        ext_modules=modules,
        cmdclass={"build_ext": BuildExtension, "dist_info": Metadata, "egg_info": Labelled},
        options={"bdist_wheel": {"py_limited_api": "cp310"}} if modules and LIMITED_API else {},
        **page(),
    )
