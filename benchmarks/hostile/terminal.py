"""Fuzz of the terminal's input, with the real app in a pseudo-terminal: whatever comes in, the app goes on, and what
was being written is there after a `kill -9`, a hangup and a restart.

    python benchmarks/hostile/terminal.py [--quick] [--sequences 10000] [--minutes 20] [--seed 1]

Key reports, mouse reports, replies and pastes are made at random or mutated, cut into packets and sent at a steady
rate. In every other run of the app they may be anything but a key that quits. In the runs between, a draft is typed
first, and what comes then must not change it: releases, modifiers, replies, sequences that mean nothing. Then the app
is killed or its terminal closed; the next one must show the draft. Failures are: an end that was not asked for, a
traceback or a log of one, a keyboard that no longer types, a draft that was changed, and one that was lost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pexpect
import pyte
from common import MeasureError, Row, Target, arguments, machine, report, run_main, say
from textual.events import Key

from cpuchat.tui.terminal.input import InputParser

COLUMNS, LINES = 100, 30
PER_RUN = 100  # sequences
START_S, ANSWER_S, END_S = 60.0, 20.0, 30.0
SAVED_S = 0.6  # after the last change of a draft, it must be on disk
BAD_WORDS = (b"Traceback", b"internal error", b"killed by SIGHUP")
QUITS = {"ctrl+q", "ctrl+c", "super+c", "ctrl+z", "super+z"}
READY = "Enter sends"
CONFIG = """\
[hardware]
probe = false
counters = false
[engine]
ctx = 2048
threads = 1
[speculation]
drafters = "off"
[chat]
max_tokens = 16
"""
KNOWN = (
    "\x1b[A", "\x1b[1;5D", "\x1b[97;1:1u", "\x1b[97:65;2;65u", "\x1b[27;5;97~", "\x1b[200~ab\x1b[201~", "\x1b[<35;9;9M",
    "\x1b[M !!", "\x1bOP", "\x1b]11;rgb:ff/ff/ff\x1b\\", "\x1bP>|XTerm(370)\x1b\\", "\x1b[?2026;2$y", "\x1b[24;80R",
    "\x1b\r",
    "\x1b[65;30;97;1;0;1_", "\x1b[48;30;100;480;900t", "\x1b[13;2u", "\x1b[?62;22c", "\x1b[57441;2:3u",
)  # fmt: skip
NUMBERS = ("", "0", "1", "2", "3", "13", "27", "97", "200", "1081", "57399", "57441", "1114112", "55296", "4294967296")
STRINGS = ("\x1b]11;", "\x1b]4;1;", "\x1b]52;c;", "\x1bP>|", "\x1bP1+r", "\x1b_G", "\x1b^", "\x1bX", "\x1b]", "\x1bP")
SIZES = ("0", "1", "30", "100", "480", "99999", "-3", "7:1")

Draw = random.Random
Make = Callable[[Draw], bytes]


def number(draw: Draw) -> str:
    some = str(draw.randrange(draw.choice((300, 70_000))))
    return draw.choice((*NUMBERS, some, some, some, "9" * draw.choice((20, 400, 5000))))


def report_of(draw: Draw) -> bytes:
    """A report of a key, by kitty or modifyOtherKeys, with any number of fields and sub-fields."""
    widths = draw.choices((1, 1, 1, 2, 3, 5), k=draw.choice((1, 2, 2, 3, 4)))
    fields = ";".join(":".join(number(draw) for _ in range(width)) for width in widths)
    return f"\x1b[{draw.choice(('', '', '', *'?><='))}{fields}{draw.choice('uuuu~~ABCDHFPQRSZ$_tcnyMm')}".encode()


def mouse(draw: Draw) -> bytes:
    a, b, c = (draw.randrange(-5, 300) for _ in range(3))
    raw = bytes(draw.randrange(256) for _ in range(3))
    return draw.choice(
        (b"\x1b[M" + raw, f"\x1b[<{a};{b};{c}{draw.choice('Mm')}".encode(), f"\x1b[{a};{b};{c}M".encode())
    )


def string(draw: Draw) -> bytes:
    """A reply, whole or cut."""
    body = "".join(draw.choices("rgb:/0123456789abcdef;=ABC\\é", k=draw.choice((0, 3, 20, 300))))
    return (draw.choice(STRINGS) + body + draw.choice(("\x1b\\", "\x07", "\x1b", "", "\x9c"))).encode()


def resize(draw: Draw) -> bytes:
    return f"\x1b[48;{';'.join(draw.choices(SIZES, k=4))}t".encode()


def paste(draw: Draw) -> bytes:
    marks = draw.choices((b"\x1b[200~", b"\x1b[201~", b"\x1b[200~", b"\x1b[20"), k=draw.randrange(1, 4))
    texts = (b"one\rtwo", b"\x1b[31mred", bytes(range(1, 256)), b"", b"z" * 5000)
    return b"".join(mark + draw.choice(texts) for mark in marks)


def anything(draw: Draw) -> bytes:
    text = "".join(chr(draw.choice((draw.randrange(32, 0xD800), draw.randrange(0x10000, 0x110000)))) for _ in range(4))
    raw = (draw.randbytes(draw.randrange(1, 12)), b"\x1b" + draw.randbytes(2), b"\x1b[" + draw.randbytes(4))
    return draw.choice((*raw, text.encode()))


def mutated(draw: Draw) -> bytes:
    """A few bytes changed, left out, doubled or put in."""
    data = bytearray(draw.choice(KNOWN).encode())
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(4):
            case 0:
                data[at : at + 1] = draw.randbytes(1)
            case 1:
                del data[at : at + draw.randrange(1, 4)]
            case 2:
                data[at:at] = data[at : at + 4]
            case _:
                data[at:at] = draw.choice((b"\x1b", b";", b":", b"\0", b"\x9b", b"\xff", b"9" * 30, b"\x1b["))
    return bytes(data)


KINDS: dict[str, Make] = {"report": report_of, "mouse": mouse, "string": string, "resize": resize, "paste": paste,
                          "anything": anything, "mutated": mutated}  # fmt: skip


def release(draw: Draw) -> bytes:
    code = draw.choice((13, 27, 97, 99, 113, 127, 1089, 57399, 57441))
    return f"\x1b[{code}{draw.choice(('', ':65', '::99'))};{draw.randrange(1, 257)}:3u".encode()


def meaningless(draw: Draw) -> bytes:
    return draw.choice((
        f"\x1b[{draw.randrange(57441, 57455)};{draw.randrange(1, 9)}u", f"\x1b[{draw.randrange(1_114_112, 10**9)}u",
        f"\x1b[{draw.randrange(0xD800, 0xE000)};1u", f"\x1b[1;1:3{draw.choice('ABCDHF')}", f"\x1b[{'1;' * 400}u",
        f"\x1b[{draw.choice('?><=')}{draw.randrange(999)};1{draw.choice('cnxm')}", "\x1b[24;80R",
        "\x1b[48;0;0;0;0t", "\x1b[201~",
        f"\x1b[<35;{draw.randrange(-9, 9999)};{draw.randrange(-9, 0)}M", "\x1b[17;29;0;1;8;1_", "\x1b[65;30;97;0;0;1_",
        "\x1bP>|XTerm(370)\x1b\\", "\x1b]4;1;rgb:0/0/0\x07", "\x1b_Gi=1;OK\x1b\\", "\x1bP1+r544e\x1b\\",
        "\x1b[4;2$y", "\x1b[I",
    )).encode()  # fmt: skip


HARMLESS: dict[str, Make] = {"release": release, "meaningless": meaningless}


def quits(data: bytes) -> bool:
    """Whether it holds a key that rightly ends or stops the app, however the parts of it are taken."""
    for step in (len(data) or 1, 1):
        now = [0.0]
        parser = InputParser(lambda now=now: now[0])
        found = [one for at in range(0, len(data), step) for one in parser.feed(data[at : at + step])]
        for _ in range(50):
            now[0] += 0.1
            found += parser.tick()
        if any(isinstance(one, Key) and one.key.removeprefix("alt+") in QUITS for one in found):
            return True
    return any(byte in data for byte in b"\x03\x11\x1a")


class App:
    """The running app."""

    def __init__(self, folder: Path) -> None:
        places = {f"CPUCHAT_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "CACHE")}
        environment = {**os.environ, **places, "HOME": str(folder), "HF_HUB_OFFLINE": "1", "TERM": "xterm-256color"}
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self.output = bytearray()
        self.status = ""
        command = ["-P", "-m", "cpuchat.cli.main"]
        self._child = pexpect.spawn(sys.executable, command, env=environment, dimensions=(LINES, COLUMNS), timeout=None)
        self._child.delaybeforesend = None

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    def send(self, data: bytes) -> None:
        if not self.status:
            self._child.send(data)

    def take(self, seconds: float) -> None:
        """Take its output for so long, or until it ends."""
        until = time.monotonic() + seconds
        while not self.status and (left := until - time.monotonic()) > 0:
            try:
                data = self._child.read_nonblocking(1 << 16, timeout=left)
            except pexpect.TIMEOUT:
                return
            except (pexpect.EOF, OSError):
                self._child.close(force=True)
                killed = self._child.exitstatus is None
                self.status = f"signal {self._child.signalstatus}" if killed else f"exit {self._child.exitstatus}"
                return
            self.output += data
            self._stream.feed(data)

    def wait_for(self, text: str, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while text not in self.text and not self.status and time.monotonic() < until:
            self.take(0.05)
        return text in self.text

    def end(self, how: signal.Signals | None) -> None:
        """Kill it, or close its terminal."""
        if self.status:
            return
        pid = self._child.pid
        assert pid is not None
        if how is None:
            os.close(self._child.child_fd)
            until = time.monotonic() + END_S
            while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
                time.sleep(0.05)
        else:
            os.kill(pid, how)
            self.take(END_S)
        self.status = self.status or "ended by us"


class Fuzz:
    """Runs of the app after each other, with what failed."""

    def __init__(self, draw: Draw, folder: Path, seconds_each: float) -> None:
        self._draw, self._folder, self._seconds = draw, folder, seconds_each
        self._drafts = 0
        self._wanted = ""
        self.counts: Counter[str] = Counter()

    def run(self, count: int, *, harmless: bool) -> None:
        """Start the app, look for the draft of the one before, send `count` sequences, and end it."""
        app = App(self._folder)
        if not app.wait_for(READY, START_S):
            raise MeasureError(f"the app does not start ({app.status}):\n{app.text}")
        if self._wanted:
            self._check("drafts lost", app.wait_for(self._wanted, ANSWER_S), f"{self._wanted!r} is not shown", app)
            self._wanted = ""
            app.send(b"\x1b[1;5F" + b"\x15" * 4)
        draft = ""
        if harmless:
            self._drafts += 1
            draft = f"draft{self._drafts}of{self._draw.randrange(10**6)}"
            app.send(draft.encode())
            self._check("keyboards dead", app.wait_for(draft, ANSWER_S), "the draft is not shown", app)
        for _ in range(count):
            if app.status:
                break
            self._send(app, HARMLESS if harmless else KINDS)
        self._check_end(app)
        if harmless and not app.status:
            app.take(SAVED_S)
            app.send(b"!")
            whole = app.wait_for(f"{draft}!", ANSWER_S)
            self._check("drafts changed", whole, f"{draft!r} is another", app)
            app.take(SAVED_S)
            self._wanted = f"{draft}!" if whole else ""
        app.end(self._draw.choice((signal.SIGKILL, signal.SIGHUP, None)))

    def _send(self, app: App, kinds: dict[str, Make]) -> None:
        kind = self._draw.choice(list(kinds))
        data = kinds[kind](self._draw)
        while quits(data):
            data = kinds[kind](self._draw)
        began, parts = time.monotonic(), [data]
        if len(data) > 1 and self._draw.random() < 0.3:
            cut = self._draw.randrange(1, len(data))
            parts = [data[:cut], data[cut:]] if kinds is KINDS or cut > 1 else parts
        for part in parts:
            app.send(part)
            app.take(self._draw.choice((0.0, 0.03, 0.12)) if len(parts) > 1 else 0.0)
        self.counts[kind] += 1
        app.take(max(0.0, self._seconds - (time.monotonic() - began)))
        self._check_end(app, data)

    def _check_end(self, app: App, data: bytes = b"") -> None:
        if app.status == "exit 0":  # by its palette, a command, or a button
            self.counts["quit"] += 1
        elif app.status:
            self._check("ends of the app", False, f"{app.status} after {data!r}", app)
        words = [word for word in BAD_WORDS if word in app.output]
        logs = list(self._folder.rglob("app-*.log"))
        self._check(
            "tracebacks", not words and not logs, f"{words} {[log.read_text()[-800:] for log in logs]}, {data!r}", app
        )
        for log in logs:
            log.unlink()
        del app.output[:]

    def _check(self, what: str, held: bool, why: str, app: App) -> None:
        if not held:
            self.counts[what] += 1
            say(f"{what}: {why}\n{app.text if 'traceback' not in what else ''}")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, default=0, help="how many (0: 10,000, quick 400)")
    parser.add_argument("--minutes", type=float, default=0.0, help="over how long (0: 20, quick 1)")
    parser.add_argument("--seed", type=int, default=1)


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    count = options.sequences or (400 if options.quick else 10_000)
    minutes = options.minutes or (1.0 if options.quick else 20.0)
    with tempfile.TemporaryDirectory(prefix="terminal-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "config").mkdir()
        (folder / "config" / "config.toml").write_text(CONFIG)
        fuzz = Fuzz(random.Random(options.seed), folder, 60 * minutes / count)
        left, runs = count, 0
        while left > 0:
            fuzz.run(min(PER_RUN, left), harmless=runs % 2 == 0)
            left, runs = left - PER_RUN, runs + 1
        fuzz.run(0, harmless=True)
    sent = ", ".join(f"{fuzz.counts[kind]} {kind}" for kind in (*KINDS, *HARMLESS))
    rows = [
        Row(what, "", [float(fuzz.counts[what])], (), Target(0, at_least=False))
        for what in ("ends of the app", "tracebacks", "keyboards dead", "drafts changed", "drafts lost")
    ]
    remarks = [
        f"{count} sequences over {minutes:g} min, seed {options.seed}: {sent}",
        f"{runs + 1} starts, {fuzz.counts['quit']} quit by keys",
    ]
    report("terminal_input", where, rows, quick=options.quick, remarks=remarks)


if __name__ == "__main__":
    run_main(main)
