"""Build llama.cpp's own libraries, whose parser of answers `templates.py` compares with. Takes minutes; done once.

They come from the source distribution of exactly the llama-cpp-python that is installed, with the same ggml switches
as the product's engine. Result: benchmarks/work/llama/plain/bin.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from common import WORK, MeasureError

PACKAGE = "llama-cpp-python"
ROOT = WORK / "llama"
CHECKOUT = Path(__file__).resolve().parent.parent

# What the engine is built with (pyproject.toml), plus what keeps the build small and off the network.
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


def libraries() -> Path:
    """The folder of the libraries, which are built the first time.

    Raises:
        MeasureError: there is neither pip nor uv to download the source with.
    """
    binaries = ROOT / "plain" / "bin"
    if not (binaries / "llama-server").is_file():
        version = installed_version()
        cmake(unpack(fetch_sdist(version), version), ROOT / "plain", ["llama-server"], os.cpu_count() or 1)
    return binaries


def installed_version() -> str:
    return importlib.metadata.version(PACKAGE)


def fetch_sdist(version: str) -> Path:
    target = WORK / "sdist"
    file = target / f"llama_cpp_python-{version}.tar.gz"
    if not file.is_file():
        run([*pip(), "download", "--no-deps", "--no-binary", PACKAGE, "--dest", str(target), f"{PACKAGE}=={version}"])
    return file


def pip() -> list[str]:
    """The command of pip, through the uv that `make setup` uses where this Python has none. Raises as `find_uv`."""
    own = [sys.executable, "-m", "pip"]
    has_pip = not subprocess.run([*own, "--version"], capture_output=True).returncode
    return own if has_pip else [find_uv(), "tool", "run", "pip"]


def find_uv() -> str:
    """The uv of the set-up: on the PATH, else the one that it put into .tools.

    Raises:
        MeasureError: there is none.
    """
    uv = shutil.which("uv") or shutil.which("uv", path=CHECKOUT / ".tools/bin")
    if uv is None:
        raise MeasureError("neither pip nor uv found: run `make setup`")
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


def cmake(source: Path, build: Path, targets: list[str], jobs: int) -> None:
    definitions = [f"-D{key}={value}" for key, value in SWITCHES.items()]
    if is_elsewhere(build, source):
        shutil.rmtree(build)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run(["cmake", "-S", str(source), "-B", str(build), *generator, *definitions])
    run(["cmake", "--build", str(build), "--parallel", str(jobs), "--target", *targets])
