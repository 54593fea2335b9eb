"""A program in the place of `aplay`: it takes samples as fast as a sound device plays them, and keeps them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

_PROGRAM = """#!{python}
import os, sys, time
rate = int(sys.argv[sys.argv.index("-r") + 1])
start = time.monotonic()
heard = 0
with open({file!r}, "ab", buffering=0) as kept:
    while block := os.read(0, 1 << 16):
        kept.write(block)
        heard += len(block) / (2 * rate)
        if {paced!r}:
            time.sleep(max(0.0, heard - (time.monotonic() - start)))
sys.exit({status})
"""


class SoundProgram:
    """What was played, in the file of a program that is the only one on the PATH. `status` is its exit status, or an
    expression for it over the seconds that it `heard`."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, paced: bool = False, status: int | str = 0
    ) -> None:
        self.file = folder / "heard.raw"
        folder.mkdir()
        program = folder / "aplay"
        program.write_text(
            _PROGRAM.format(python=sys.executable, file=str(self.file), paced=paced, status=status), encoding="utf-8"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    @property
    def samples(self) -> np.ndarray:
        """Return everything that was played so far, from -1 to 1."""
        data = self.file.read_bytes() if self.file.exists() else b""
        return np.frombuffer(data[: len(data) // 2 * 2], "<i2") / 32768

    def seconds(self, rate: int = 24_000) -> float:
        return len(self.samples) / rate


def no_sound_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no program that plays on the PATH."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", os.fspath(folder))
