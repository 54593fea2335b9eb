"""Runs the real command line as a user's shell does."""

from __future__ import annotations

import subprocess
import sys

HANG_GUARD = 120
PLAIN = ("--drafters", "off")
COMMAND = (sys.executable, "-m", "cpuchat.cli.main")


def run(*arguments: str, stdin: str | bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Run to the end; standard input is empty unless given."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([*COMMAND, *arguments], input=data or b"", capture_output=True, timeout=HANG_GUARD)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start and leave running, with pipes."""
    return subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
