"""Build the tools that the benchmarks compare against: llama-bench, llama-completion, llama-server, llama-perplexity.

They come from the source distribution of exactly the llama-cpp-python that is installed, with the same ggml
switches as the product's engine, so that a difference in the figures is ours and not the compiler's. A second set
runs on a ggml with OpenMP: only the ggml libraries are compiled twice, the rest is the same binaries (only ggml
contains the thread code).

    python benchmarks/build_llama.py [--sdist FILE] [--jobs N] [--rpc]

Result: benchmarks/work/llama/{plain,openmp,rpc}/bin. Takes some 6 minutes on two cores; done once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from common import WORK, MeasureError, run_main

PACKAGE = "llama-cpp-python"
ROOT = WORK / "llama"
CHECKOUT = Path(__file__).resolve().parent.parent

# What the engine is built with (pyproject.toml), plus what keeps the tools small and off the network.
SWITCHES = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
    "GGML_NATIVE": "ON",
    "GGML_OPENMP": "OFF",
    "CMAKE_CXX_FLAGS": "-fno-dse",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
}


def tool(name: str, *, openmp: bool = False, rpc: bool = False) -> Path:
    """The built program.

    Raises:
        MeasureError: it is not there; the message says how to build it.
    """
    variant = "openmp" if openmp else "rpc" if rpc else "plain"
    file = ROOT / variant / "bin" / name
    if not file.is_file():
        command = "python benchmarks/build_llama.py" + (" --rpc" if rpc else "")
        raise MeasureError(f"{name} is not built: run `{command}` first")
    return file


def installed_version() -> str:
    return importlib.metadata.version(PACKAGE)


def fetch_sdist(version: str) -> Path:
    """Download the source distribution with pip, through the uv that `make setup` uses where this Python has no pip."""
    target = WORK / "sdist"
    target.mkdir(parents=True, exist_ok=True)
    pattern = f"llama_cpp_python-{version}.tar.gz"
    if not (target / pattern).is_file():
        pip = [sys.executable, "-m", "pip"]
        if subprocess.run([*pip, "--version"], capture_output=True).returncode:
            pip = [find_uv(), "tool", "run", "pip"]
        wanted = f"{PACKAGE}=={version}"
        run([*pip, "download", "--no-deps", "--no-binary", PACKAGE, "--dest", str(target), wanted])
    return target / pattern


def find_uv() -> str:
    """The uv of the set-up: on the PATH, else the one that it put into .tools.

    Raises:
        MeasureError: there is none.
    """
    uv = shutil.which("uv") or shutil.which("uv", path=CHECKOUT / ".tools/bin")
    if uv is None:
        raise MeasureError("neither pip nor uv found: run `make setup`, or give the source distribution as --sdist")
    return uv


def unpack(sdist: Path, version: str) -> Path:
    """Unpack once; returns the llama.cpp folder in it."""
    source = ROOT / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    if not (source / "CMakeLists.txt").is_file():
        print(f"unpacking {sdist.name}", flush=True)
        with tarfile.open(sdist) as archive:
            archive.extractall(ROOT, filter="data")
    return source


def run(command: list[str]) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True)


def is_elsewhere(build: Path, source: Path) -> bool:
    """Whether the CMake cache in `build` was made in another folder or for another source; CMake would refuse it."""
    try:
        lines = (build / "CMakeCache.txt").read_text().splitlines()
    except FileNotFoundError:
        return False
    cached = dict(line.split("=", 1) for line in lines if "=" in line)
    made_for = {"CMAKE_CACHEFILE_DIR:INTERNAL": build, "CMAKE_HOME_DIRECTORY:INTERNAL": source}
    return any(Path(cached[name]).resolve() != folder.resolve() for name, folder in made_for.items() if name in cached)


def cmake(source: Path, build: Path, targets: list[str], jobs: int, **changes: str) -> None:
    definitions = [f"-D{key}={value}" for key, value in {**SWITCHES, **changes}.items()]
    if is_elsewhere(build, source):
        shutil.rmtree(build)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(["cmake", "-S", str(source), "-B", str(build), *generator, *definitions])
    run(["cmake", "--build", str(build), "--parallel", str(jobs), "--target", *targets])


def build_variant(source: Path, plain: Path, jobs: int, name: str, targets: list[str], **changes: str) -> None:
    """Compile ggml another way, with `targets`, and lay both over a copy of the plain build."""
    build = ROOT / name / "build"
    cmake(source, build, targets, jobs, **changes)
    binaries = ROOT / name / "bin"
    shutil.rmtree(binaries, ignore_errors=True)
    shutil.copytree(plain / "bin", binaries, symlinks=True, ignore=shutil.ignore_patterns("libggml*"))
    for built in sorted((build / "bin").glob("*ggml*")):
        shutil.copy2(built, binaries / built.name, follow_symlinks=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sdist", type=Path, help="use this source distribution instead of downloading it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rpc", action="store_true", help="also a set with RPC, for rpc.py")
    options = parser.parse_args()
    version = installed_version()
    sdist = options.sdist or fetch_sdist(version)
    if version not in sdist.name:
        raise MeasureError(f"{sdist.name} is not the source of the installed {PACKAGE} {version}")
    source = unpack(sdist, version)
    plain = ROOT / "plain"
    cmake(source, plain, ["llama-bench", "llama-completion", "llama-server", "llama-perplexity"], options.jobs)
    build_variant(source, plain, options.jobs, "openmp", ["ggml"], GGML_OPENMP="ON")
    if options.rpc:
        build_variant(source, plain, options.jobs, "rpc", ["ggml", "ggml-rpc-server"], GGML_RPC="ON")
    print(f"built {tool('llama-bench')}, {tool('llama-server')}, {tool('llama-bench', openmp=True)}")


if __name__ == "__main__":
    run_main(main)
