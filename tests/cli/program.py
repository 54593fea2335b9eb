"""Runs the command line: in this process, or as a user's shell does."""

from __future__ import annotations

import io
import subprocess
import sys
from unittest.mock import patch

from cpuchat.cli.main import main

HANG_GUARD = 120
PLAIN = ("--drafters", "off")
COMMAND = (sys.executable, "-m", "cpuchat.cli.main")


def run(*arguments: str, stdin: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Run to the end in this process, which has imported everything already; standard input is empty unless given."""
    data = stdin.encode() if isinstance(stdin, str) else stdin or b""
    given, out, err = (io.TextIOWrapper(io.BytesIO(start), encoding="utf-8") for start in (data, b"", b""))
    with patch.multiple(sys, stdin=given, stdout=out, stderr=err):
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, *map(_written, (out, err)))


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


def run_process(*arguments: str, stdin: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own: for what ends it, loads the engine, or depends on how it was started."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([*COMMAND, *arguments], input=data or b"", capture_output=True, timeout=HANG_GUARD)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start and leave running, with pipes."""
    return subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
