"""Tests the app on a driver of Textual's that is no terminal, as textual-serve starts it for a page."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import IO

import pytest

from tests.cli.program import COMMAND, HANG_GUARD

pytestmark = pytest.mark.full

DRIVER = {"TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver", "COLUMNS": "100", "ROWS": "30"}
QUIT = b'{"type": "quit"}'


def packets(output: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield what the driver writes behind its first line: D is for a terminal, M about it."""
    assert output.readline() == b"__GANGLION__\n"
    while kind := output.read(1):
        yield kind, output.read(int.from_bytes(output.read(4), "big"))


def test_the_app_draws_on_the_driver_that_textual_serve_names() -> None:
    pipe = subprocess.PIPE
    command = [*COMMAND, "demo"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | DRIVER) as app:
        assert app.stdin is not None and app.stdout is not None and app.stderr is not None
        drawn, last = b"", b""
        for kind, payload in packets(app.stdout):
            last = payload if kind == b"M" else last
            if kind == b"D" and b"What can you do?" not in drawn:
                drawn += payload
                if b"What can you do?" in drawn:
                    app.stdin.write(b"M" + len(QUIT).to_bytes(4, "big") + QUIT)
                    app.stdin.flush()
        assert (app.wait(HANG_GUARD), app.stderr.read(), last) == (0, b"", b'{"type": "exit"}')
        assert b"What can you do?" in drawn
