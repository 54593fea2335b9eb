"""cpuchat in a real pseudo-terminal of 120x40, with folders of its own, watched by an emulator when wanted."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pexpect
import pyte
from common import MeasureError

from cpuchat.protocol.timings import Timings

COLUMNS, LINES = 120, 40
ENTER, NEW_CHAT, QUIT, PASTE = "\r", "\x0e", "\x11", "\x1b[200~{}\x1b[201~"
PROGRAM = Path(__file__).parent.parent / ".venv" / "bin" / "cpuchat"


def command() -> list[str]:
    """The installed program.

    Raises:
        MeasureError: it is not installed.
    """
    if not PROGRAM.is_file():
        raise MeasureError(f"{PROGRAM} is missing: run `make setup` first")
    return [str(PROGRAM)]


def environment(folder: Path) -> dict[str, str]:
    """The environment with all of cpuchat's folders below `folder`, and with bytecode kept, as Python does by default:
    compiling the sources takes longer than everything else at a start.
    """
    places = {f"CPUCHAT_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "CACHE")}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **places, "TERM": "xterm-256color", "COLORTERM": "truecolor"}


class Terminal:
    """The running app. `spawned` and `last_output` are perf_counter seconds."""

    def __init__(self, arguments: list[str], folder: Path, started_by: Sequence[str] = ()) -> None:
        """`started_by` takes the place of the installed program."""
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self._unseen: list[bytes] = []
        program, *options = started_by or command()
        self.spawned = time.perf_counter()
        self.last_output = self.spawned
        self._child = pexpect.spawn(
            program,
            [*options, *arguments],
            env=environment(folder),
            dimensions=(LINES, COLUMNS),
            timeout=60,
            echo=False,
        )
        self._child.delaybeforesend = None  # 50 ms, for prompts that ask for passwords

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    def type(self, keys: str) -> None:
        self._child.send(keys)

    def wait_for(self, found: Callable[[str], bool], seconds: float = 60.0) -> float:
        """Feed the emulator until its screen satisfies `found`; the time at which that output had arrived.

        Raises:
            MeasureError: it ended, or the time is up; the message holds the screen.
        """
        deadline = time.perf_counter() + seconds
        self._catch_up()
        while not found(self.text):
            if time.perf_counter() > deadline:
                raise MeasureError(f"not on the screen after {seconds:.0f} s:\n{self.text}")
            chunk = self._read(0.05)
            if chunk:
                self._stream.feed(chunk)
        return self.last_output

    def drain(self, until: Callable[[], bool], seconds: float = 120.0, every: float = 0.1) -> None:
        """Take the output without looking at it, as cheaply as a terminal would, until `until()`.

        Raises:
            MeasureError: it ended, or the time is up.
        """
        deadline = time.perf_counter() + seconds
        while not until():
            if time.perf_counter() > deadline:
                self._catch_up()
                raise MeasureError(f"nothing after {seconds:.0f} s:\n{self.text}")
            self.skip(every)

    def skip(self, seconds: float) -> None:
        """Take the output of so many seconds without looking at it."""
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            self._unseen.append(self._read(left))

    def wait_for_bytes(self, wanted: bytes, seconds: float = 10.0) -> tuple[float, float]:
        """Take the output until it has `wanted`; the times at which that and the first output had arrived.

        Raises:
            MeasureError: it ended, or the time is up.
        """
        deadline, taken, first = time.perf_counter() + seconds, b"", 0.0
        while wanted not in taken:
            if time.perf_counter() > deadline:
                raise MeasureError(f"{wanted!r} is not on the screen after {seconds:.0f} s")
            chunk = self._read(0.05)
            if chunk and not first:
                first = self.last_output
            taken = taken[-len(wanted) :] + chunk
            self._unseen.append(chunk)
        return self.last_output, first

    def shown_at(self, found: Callable[[str], bool], seconds: float) -> float:
        """Take the output of so many seconds and look at it then, as looking delays what is measured: the time at which
        that output had arrived with which the screen satisfies `found`.

        Raises:
            MeasureError: it ended, or its screen did not; the message holds the screen.
        """
        self._catch_up()
        taken: list[tuple[float, bytes]] = []
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            chunk = self._read(left)
            taken.append((self.last_output, chunk))
        for at, chunk in taken:
            self._stream.feed(chunk)
            if found(self.text):
                return at
        raise MeasureError(f"not on the screen after {seconds:.0f} s:\n{self.text}")

    def _catch_up(self) -> None:
        """Show the emulator what `drain` took."""
        self._stream.feed(b"".join(self._unseen))
        self._unseen.clear()

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


@contextlib.contextmanager
def app(*arguments: str, config: str = "", started_by: Sequence[str] = ()) -> Iterator[tuple[Terminal, Path]]:
    """A fresh start of the app with `config` as its settings; gives the terminal and the folder of its data.

    `started_by` is as of `Terminal`.
    """
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as name:
        folder = Path(name)
        (folder / "config").mkdir()
        (folder / "config" / "config.toml").write_text(config, encoding="utf-8")
        terminal = Terminal(list(arguments), folder, started_by)
        try:
            yield terminal, folder / "data"
        finally:
            terminal.close()


def tui_answers(model: Path, prompts: list[str], n_tokens: int, threads: int) -> list[Timings]:
    """Start the app with `model` and send each prompt in a chat of its own; the figures that its store keeps.

    The answers are greedy and `n_tokens` long. The read bandwidth is not measured before them, as in all starts but the
    first: the memory that a measurement frees keeps a virtual machine's kernel busy for the first answers.

    Raises:
        MeasureError: the app ended, or an answer did not come or was too short.
    """
    config = (
        f"[engine]\nthreads = {threads}\nctx = 1024\n"
        f"[sampling]\ntemperature = 0.0\nseed = 1\n[chat]\nmax_tokens = {n_tokens}\n"
        "[hardware]\nprobe = false\n"
    )
    with app("--model", str(model), config=config) as (terminal, data):
        terminal.wait_for(is_ready)
        for count, prompt in enumerate(prompts, start=1):
            if count > 1:
                terminal.type(NEW_CHAT)
            terminal.type(PASTE.format(prompt.strip()))
            terminal.type(ENTER)
            # Looking ten times a second took 2 % of the tokens from the model that is measured.
            terminal.drain(lambda wanted=count: len(_stored(data)) >= wanted, every=2.0)
        answers = _stored(data)
    if any(timings.predicted_n < n_tokens for timings in answers):
        raise MeasureError(f"the app's answers have {[timings.predicted_n for timings in answers]} tokens")
    return answers


def is_ready(screen: str) -> bool:
    """The status line shows a loaded model."""
    return re.search(r"\d+ cores? · .*ctx", screen) is not None


def _stored(data: Path) -> list[Timings]:
    """Figures of the finished answers. Reads beside the running app: `ChatStore` would take the file over."""
    file = data / "chats.db"
    if not file.is_file():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=5)) as connection:
        try:
            rows = connection.execute(
                "SELECT timings FROM messages WHERE timings IS NOT NULL AND stop_reason IS NOT NULL ORDER BY id"
            ).fetchall()
        except sqlite3.OperationalError:  # the tables are not there yet
            return []
    return [msgspec.json.decode(text, type=Timings) for (text,) in rows]
