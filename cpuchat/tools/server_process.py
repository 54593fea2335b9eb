"""The process of an MCP server: in a group of its own, read in lines within limits, ended with its group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, cast

from cpuchat.base.processes import exit_reason
from cpuchat.telemetry.units import size
from cpuchat.tools.config import ToolServerConfig
from cpuchat.tools.loop import LONGEST_MESSAGE, MAX_BYTES, MAX_MESSAGES

_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
_LOG_BYTES = 1 << 20
_LINE_BYTES = 1_000  # of the last line, which may tell why it ended
_CLOSING_SECONDS = 0.5
"""Seconds that a server gets to exit when its standard input is closed, as the protocol has it."""
_ENDING_SECONDS = 1.0
"""Seconds between SIGTERM and SIGKILL."""


class ServerEnded(Exception):
    """The server has ended, or closed its output; its process knows why."""


class ServerInvalid(Exception):
    """What the server sent is not MCP, or an error."""


class ToolServerProcess(asyncio.SubprocessProtocol):
    """A running server, as `start` makes one. Use it from one event loop only.

    `fault` is the rule that it broke, for which it was ended; "": none. `n_messages` counts the lines of its output
    since `begin_call`.
    """

    def __init__(self, log: BinaryIO | None) -> None:
        self.fault = ""
        self.n_messages = 0
        self._n_bytes = 0
        self._rest = b""
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._log = log
        self._log_bytes = 0
        self._said = b""
        self._status: int | None = None
        self._exited = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._transport: asyncio.SubprocessTransport

    @classmethod
    async def start(cls, server: ToolServerConfig, log: Path) -> ToolServerProcess:
        """Start a server; what it writes to its standard error goes to `log`, a megabyte at most. Raises OSError: there
        is no such command or folder; ValueError: an argument has a NUL.
        """
        file = _opened(log)
        process = cls(file)
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: process, server.command, *server.args,
                env=server.environment(), cwd=server.cwd or None, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            if file is not None:
                file.close()
            raise
        return process

    @property
    def alive(self) -> bool:
        """Return whether it runs and is not being ended."""
        return self._status is None and self._ending is None

    def begin_call(self) -> None:
        """Count what it writes from here on."""
        self._n_bytes = self.n_messages = 0

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield what it writes, until it ends or breaks a limit."""
        while (line := await self._lines.get()) is not None and not self.fault:
            yield line

    def write(self, line: bytes) -> None:
        """Queue a line for it. What is written to a server that has ended is dropped."""
        pipe = cast("asyncio.WriteTransport | None", self._transport.get_pipe_transport(0))
        if pipe is not None and not pipe.is_closing():
            pipe.write(line + b"\n")

    def log(self, data: bytes) -> None:
        """Keep what it wrote that is no message."""
        if line := data.rstrip().rpartition(b"\n")[2]:
            self._said = line[:_LINE_BYTES]
        if self._log is None or self._log.closed or self._log_bytes >= _LOG_BYTES:
            return
        with contextlib.suppress(OSError):
            self._log_bytes += self._log.write(data[: _LOG_BYTES - self._log_bytes])

    def fail(self, fault: str) -> None:
        """End it for a rule that it broke."""
        self.fault, self._rest = fault, b""
        self._lines.put_nowait(None)
        self.end(now=True)

    async def failure(self) -> str:
        """Return why it has ended, once it has; it is ended if it has only closed its output."""
        await self._exits_within(_CLOSING_SECONDS)
        if self.fault or self._status is None:
            await self.end()
            return self.fault or "it closed its output"
        return exit_reason(self._status, "", self._said.decode("utf-8", "replace").strip().rstrip("."))

    def end(self, *, now: bool = False) -> asyncio.Task[None]:
        """End it and its group; `now`: in the middle of a call. Returns what to wait for."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(now))
        return self._ending

    async def _end(self, now: bool) -> None:
        stdin = self._transport.get_pipe_transport(0)
        if stdin is not None:
            stdin.close()
        if now or not await self._exits_within(_CLOSING_SECONDS):
            self._signal_group(signal.SIGTERM)
            await self._exits_within(_ENDING_SECONDS)
        self._signal_group(_KILL)
        await self._exits_within(_ENDING_SECONDS)
        self._transport.close()
        if self._log is not None:
            self._log.close()

    async def _exits_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exited.wait()
        return self._exited.is_set()

    def _signal_group(self, number: int) -> None:
        if self._status is not None:  # its number may be that of another group by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                self._transport.kill()
            else:
                os.killpg(self._transport.get_pid(), number)

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self.log(data)
        elif not self.fault:
            self._receive(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._lines.put_nowait(None)

    def process_exited(self) -> None:
        self._signal_group(_KILL)  # what it has left behind
        self._status = self._transport.get_returncode()
        self._exited.set()

    def _receive(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._n_bytes += len(data)
        self.n_messages += len(lines)
        if max(map(len, (*lines, self._rest))) > LONGEST_MESSAGE:
            return self.fail(f"it wrote more than {size(LONGEST_MESSAGE)} in one message")
        if self._n_bytes > MAX_BYTES:
            return self.fail(f"it wrote more than {size(MAX_BYTES)}")
        if self.n_messages > MAX_MESSAGES:
            return self.fail(f"it sent more than {MAX_MESSAGES:,} messages")
        for line in lines:
            if line.strip():
                self._lines.put_nowait(line)


def _opened(log: Path) -> BinaryIO | None:
    """Return a new log; None where none can be written. One that another instance writes is left to it."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log.unlink(missing_ok=True)
        return log.open("xb", buffering=0)
    except OSError:
        return None
