"""cpuchat in a real pseudo-terminal of 120x40, with folders of its own, watched by an emulator."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte
from common import MeasureError

COLUMNS, LINES = 120, 40
QUIT = "\x11"
PROGRAM = Path(__file__).parent.parent / ".venv" / "bin" / "cpuchat"


def program() -> str:
    """The installed program.

    Raises:
        MeasureError: it is not installed.
    """
    if not PROGRAM.is_file():
        raise MeasureError(f"{PROGRAM} is missing: run `make setup` first")
    return str(PROGRAM)


def environment(folder: Path) -> dict[str, str]:
    """The environment with all of cpuchat's folders below `folder`, and with bytecode kept, as Python does by default:
    compiling the sources takes longer than everything else at a start.
    """
    places = {f"CPUCHAT_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "CACHE")}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **places, "TERM": "xterm-256color", "COLORTERM": "truecolor"}


class Terminal:
    """The running app. `spawned` and `last_output` are perf_counter seconds."""

    def __init__(self, folder: Path) -> None:
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self.spawned = time.perf_counter()
        self.last_output = self.spawned
        self._child = pexpect.spawn(
            program(), env=environment(folder), dimensions=(LINES, COLUMNS), timeout=60, echo=False
        )
        self._child.delaybeforesend = None  # 50 ms, for prompts that ask for passwords

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    def wait_for(self, found: Callable[[str], bool], seconds: float = 60.0) -> float:
        """Feed the emulator until its screen satisfies `found`; the time at which that output had arrived.

        Raises:
            MeasureError: it ended, or the time is up; the message holds the screen.
        """
        deadline = time.perf_counter() + seconds
        while not found(self.text):
            if time.perf_counter() > deadline:
                raise MeasureError(f"not on the screen after {seconds:.0f} s:\n{self.text}")
            chunk = self._read(0.05)
            if chunk:
                self._stream.feed(chunk)
        return self.last_output

    def _read(self, seconds: float) -> bytes:
        try:
            chunk = self._child.read_nonblocking(65536, timeout=seconds)
        except pexpect.TIMEOUT:
            return b""
        except pexpect.EOF:
            raise MeasureError(f"the app ended:\n{self.text}") from None
        self.last_output = time.perf_counter()
        return chunk

    def close(self) -> None:
        """Quit as a user would, so that the worker is gone, too, when this returns; by force if that takes long."""
        with contextlib.suppress(OSError):
            self._child.send(QUIT)
            deadline = time.perf_counter() + 15
            with contextlib.suppress(MeasureError):
                while time.perf_counter() < deadline:
                    self._read(0.1)
        self._child.close(force=True)


def is_ready(screen: str) -> bool:
    """The status line shows a loaded model."""
    return re.search(r"\d+ cores? · .*ctx", screen) is not None
