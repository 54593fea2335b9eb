"""Runs the command line: in this process, or as a user's shell does."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from unittest.mock import patch

from cpuchat.cli.main import main

HANG_GUARD = 180
PLAIN = ("--drafters", "off")
COMMAND = (sys.executable, "-m", "cpuchat.cli.main")


def run(*arguments: str, stdin: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end in this process, which has imported everything; standard input is empty by default."""
    with contextlib.ExitStack() as files:
        given, out, err = (files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(3))
        given.buffer.write(stdin.encode() if isinstance(stdin, str) else stdin or b"")
        given.seek(0)
        with patch.multiple(sys, stdin=given, stdout=out, stderr=err):
            code = main(arguments)
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(
            arguments, code, bytes(out.buffer.read()).decode(), bytes(err.buffer.read()).decode()
        )


def succeeded(*arguments: str, stdin: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command, which must end well."""
    done = run(*arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done


def refused(code: int, *arguments: str, stdin: str | bytes | None = None) -> str:
    """Run the command, which must end with this status; return its standard error."""
    done = run(*arguments, stdin=stdin)
    assert done.returncode == code, done.stderr
    return done.stderr


def run_process(*arguments: str, stdin: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process: for commands that end it, load the engine, or depend on how it was started."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([*COMMAND, *arguments], input=data or b"", capture_output=True, timeout=HANG_GUARD)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start the command with pipes and leave it running."""
    return subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
