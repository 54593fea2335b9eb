"""A real terminal for end-to-end tests: the program in a pseudo-terminal, its output through a terminal emulator."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pexpect
import pyte

from cpuchat.base import paths

HANG_GUARD = 180.0
_COLORS = re.compile(rb"\x1b\[[\d;:]*m")
"""Most of what an app writes. No test looks at them, and the emulator takes long over each."""
_BEGUN = re.compile(rb"\x1b(\[[\d;:]*)?$")
KEYS = {
    "enter": "\r",
    "esc": "\x1b",
    "up": "\x1b[A",
    "down": "\x1b[B",
    "f1": "\x1bOP",
    "f2": "\x1bOQ",
    "f3": "\x1bOR",
    "f4": "\x1bOS",
    "f5": "\x1b[15~",
    "f6": "\x1b[17~",
    "f7": "\x1b[18~",
    "f8": "\x1b[19~",
    "f9": "\x1b[20~",
    "f12": "\x1b[24~",
    **{f"ctrl+{c}": chr(ord(c) - 96) for c in "abcdefghijklmnopqrstuvwxyz"},
}


class Terminal:
    """`columns` × `rows` cells. Every wait is for something to be on the screen, never for a time."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        columns: int = 80,
        rows: int = 24,
        home: Path,
        command: Sequence[str] = (sys.executable, "-m", "cpuchat.cli.main"),
        term: str = "xterm-256color",
    ) -> None:
        self.screen = pyte.Screen(columns or 80, rows or 24)
        self._stream = pyte.ByteStream(self.screen)
        environment = {
            **os.environ,
            "TERM": term,
            "COLORTERM": "truecolor",
            "LANG": "C.UTF-8",
            "HOME": str(home),
            "HF_HOME": str(home / "huggingface"),
            "TEXTUAL_ANIMATIONS": "none",
        }
        for name in ("COLUMNS", "LINES"):  # whoever runs the tests may say how wide *its* terminal is
            environment.pop(name, None)
        self._hung_up = False
        self._begun = b""
        self.raw = bytearray()
        """Everything that the program wrote."""
        self.process = pexpect.spawn(
            command[0],
            [*command[1:], *arguments],
            dimensions=(rows, columns),
            env=environment,
            timeout=None,
            # A shell's background jobs ignore it, and so do the tests in one; a program in a terminal does not.
            preexec_fn=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL),
        )
        self.first_modes = self.modes

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def text(self) -> str:
        # As `display`, which looks up the width of every character.
        rows = (self.screen.buffer[y] for y in range(self.screen.lines))
        return "\n".join("".join([row[x].data for x in range(self.screen.columns)]).rstrip() for row in rows)

    def resize(self, columns: int, rows: int) -> None:
        """Resize the window: what was outside the new size is gone."""
        self.screen.resize(lines=rows, columns=columns)
        self.process.setwinsize(rows, columns)

    def press(self, *keys: str) -> None:
        """Press named keys, see KEYS."""
        for key in keys:
            self.process.send(KEYS[key])

    def type(self, text: str) -> None:
        self.process.send(text)

    def wait_until(self, condition: Callable[[str], object], what: str) -> str:
        """Read the program's output until `condition(screen text)` holds."""
        deadline = time.monotonic() + HANG_GUARD
        while not condition(self.text):
            try:
                data = self.process.read_nonblocking(65_536, timeout=max(0.1, deadline - time.monotonic()))
            except pexpect.EOF:
                raise self._failure(f"the program ended while waiting for {what}") from None
            except pexpect.TIMEOUT:
                raise self._failure(f"never saw {what}") from None
            self._feed(data)
        return self.text

    def _feed(self, data: bytes) -> None:
        self.raw += data
        data = self._begun + data
        begun = _BEGUN.search(data)
        self._begun = begun[0] if begun else b""
        self._stream.feed(_COLORS.sub(b"", data[: len(data) - len(self._begun)]))

    def _failure(self, what: str) -> AssertionError:
        """Return what is raised: with the screen, and why the app crashed if it did."""
        logs = [log.read_text() for log in sorted(paths.log_dir().glob("app-*.log"))]
        return AssertionError("\n".join([f"{what}:", self.text, *logs]))

    def wait_for(self, text: str) -> str:
        return self.wait_until(lambda screen: text in screen, repr(text))

    def insist(self, keys: str, condition: Callable[[str], object], what: str) -> str:
        """Send `keys` until `condition(screen text)` holds, again each second: the program may refuse them at first."""
        deadline = time.monotonic() + HANG_GUARD
        sent = -math.inf
        while not condition(self.text):
            now = time.monotonic()
            if now > deadline or "stopped on an internal error" in self.text:  # there, the keys would restart it
                raise self._failure(f"never saw {what}")
            if now > sent + 1:
                self.process.send(keys)
                sent = now
            try:
                self._feed(self.process.read_nonblocking(65_536, timeout=1))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                raise self._failure(f"the program ended while waiting for {what}") from None
        return self.text

    def wait_for_end(self) -> int:
        """Return the exit status after the program closed the terminal."""
        deadline = time.monotonic() + HANG_GUARD
        while (left := deadline - time.monotonic()) > 0:
            try:
                data = self.process.read_nonblocking(65_536, timeout=left)
            except pexpect.EOF:
                break
            except pexpect.TIMEOUT:
                continue
            self._feed(data)
        else:
            raise self._failure("the program does not end")
        self.last_modes = self.modes
        self.process.close()
        status = self.process.exitstatus
        return status if status is not None else -(self.process.signalstatus or 0)

    @property
    def modes(self) -> list[object]:
        """Return what `stty` shows: whether it echoes, edits lines, turns keys into signals."""
        return termios.tcgetattr(self.process.child_fd)

    def hang_up(self) -> int:
        """Close the terminal; returns the program's exit status."""
        os.close(self.process.child_fd)
        self._hung_up = True
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        if not self._hung_up and self.process.isalive():
            self.process.close(force=True)
