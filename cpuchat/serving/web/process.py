"""The process of one tab, and the packets of its terminal.

Each packet is a type (1 byte), a length (4 bytes, big-endian) and so many bytes: D what a terminal sends or gets, M
JSON about it. Source: textual/drivers/web_driver.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import site
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

from cpuchat.children import child_environment, exit_reason, kill_group, last_output, python_command
from cpuchat.text import clean_line

_MOST_PACKET = 4 << 20
_ERRORS = "errors.txt"
_PATIENCE_SECONDS = 5.0
"""For an app to save and leave, before it is killed."""


class TabProcess:
    """Runs the app of one tab in a process group of its own, with `folder` for everything that it writes."""

    def __init__(self, folder: Path, server: str) -> None:
        self._folder = folder
        self._server = server
        self._process: Process | None = None

    async def start(self, size: tuple[int, int], watch_url: str) -> None:
        """Start the app with a terminal of so many columns and rows; it shares `watch_url`. Raises OSError."""
        folder = str(self._folder)
        environment = child_environment(
            HOME=folder,
            PYTHONUSERBASE=site.getuserbase(),  # where `pip install --user` puts packages: below the real HOME
            CPUCHAT_CONFIG_DIR=f"{folder}/config",
            CPUCHAT_DATA_DIR=f"{folder}/data",
            CPUCHAT_CACHE_DIR=f"{folder}/cache",
            CPUCHAT_WATCH_URL=watch_url,
            CPUCHAT_CACHE_SALT=secrets.token_hex(16),  # visitors learn nothing of each other's prompts
            COLUMNS=str(size[0]),
            ROWS=str(size[1]),
            TEXTUAL_COLOR_SYSTEM="truecolor",
            TERM="xterm-256color",
        )
        command = python_command("-m", "cpuchat.tui.tab", self._server, folder)
        with (self._folder / _ERRORS).open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=errors, env=environment, cwd=folder, start_new_session=True
            )

    async def read(self) -> tuple[bytes, bytes] | None:
        """Return the next packet of the app, None at its end."""
        assert self._process is not None and self._process.stdout is not None
        stdout = self._process.stdout
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            head = await stdout.readexactly(1)
            if head == b"_":  # __GANGLION__: the driver has begun
                await stdout.readline()
                head = await stdout.readexactly(1)
            size = int.from_bytes(await stdout.readexactly(4), "big")
            return (head, await stdout.readexactly(size)) if size <= _MOST_PACKET else None
        return None

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Send a packet to the app; what has ended gets nothing."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(kind + len(payload).to_bytes(4, "big") + payload)
            await self._process.stdin.drain()

    async def send_meta(self, **fields: Any) -> None:
        await self.send(b"M", json.dumps(fields).encode())

    async def failure(self) -> str:
        """Wait until the app has ended; return why it failed, "" if it did not."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._process.wait()
        status = self._process.returncode
        return exit_reason(status, "", self._last_words()) if status else ""

    def _last_words(self) -> str:
        """Return the last line that the app wrote to standard error, "" without one."""
        with contextlib.suppress(OSError), (self._folder / _ERRORS).open("rb") as errors:
            return clean_line(last_output(errors).rpartition("\n")[2])
        return ""

    async def end(self) -> None:
        """Let the app leave, then kill what is left of its group."""
        process = self._process
        if process is None:
            return
        await self.send_meta(type="quit")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while await self.read() is not None:  # a full pipe would hold it
                    pass
                await process.wait()
        kill_group(process.pid)
        await process.wait()
