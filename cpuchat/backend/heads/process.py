"""The process that hosts a llama-server: starts it, waits until it listens, and reports how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
import threading
from pathlib import Path

import msgspec

from cpuchat.backend.heads.options import HOST, KEY_VARIABLE, ServerOptions
from cpuchat.backend.process import Spawned, Spawner
from cpuchat.children import exit_reason, kill_group, last_output
from cpuchat.protocol import Failed

MODULE = "cpuchat.backend.heads.host"
_TOLD = re.compile(
    r'^(?:error: |error while handling argument "[^"]*": |\S+\.(?:cpp|c|h):\d+: )(.+)$', re.MULTILINE
)  # fmt: skip
"""What it says last: about its arguments, or as ggml's GGML_ABORT does."""
_POLL_SECONDS = 0.05
_ENDING_SECONDS = 5.0


class ServerProcess:
    """A running host, as `start` makes one. Use it from one event loop only.

    `pid` is the process that computes, None until the host has reported it; `key` is what its server wants.
    """

    def __init__(self, spawned: Spawned, port: int, key: str) -> None:
        self._process = spawned.process
        self.log, self.memory = spawned.log, spawned.memory
        self.port, self.key = port, key
        self.pid: int | None = None
        self._gone = asyncio.Event()
        self._status: int | None = None
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, name=f"llama-server-{self._process.pid}", daemon=True).start()

    @classmethod
    async def start(cls, spawner: Spawner, log_dir: Path, server: ServerOptions, memory: str) -> ServerProcess:
        """Start a host under the memory policy `memory`, in words. Raises OSError."""
        key, text = secrets.token_urlsafe(24), msgspec.json.encode(server).decode()
        more = {KEY_VARIABLE: key, "GGML_NO_BACKTRACE": "1"}  # which would wait for a debugger
        spawning = spawner.spawn(log_dir, lambda: memory, (MODULE, text), **more)
        return cls(await asyncio.wrap_future(spawning), server.port, key)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def alive(self) -> bool:
        return self._status is None

    def _watch(self) -> None:
        """Read the PID, then wait for the end. Runs on a separate thread."""
        output = self._process.stdout
        assert output is not None
        line = output.readline()
        with contextlib.suppress(ValueError):
            self.pid = int(line)
        status = self._process.wait()
        kill_group(self._process.pid)
        output.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed: no receiver is left
            self._loop.call_soon_threadsafe(self._ended, status)

    def _ended(self, status: int) -> None:
        self._status = status
        self._gone.set()

    async def listening(self) -> bool:
        """Wait until the server accepts connections; False when it ended instead. It may be loading its model still."""
        while self.alive:
            try:
                _, writer = await asyncio.open_connection(HOST, self.port)
            except OSError:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), _POLL_SECONDS)
                continue
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return True
        return False

    async def finished(self) -> None:
        """Wait until the process has exited."""
        await self._gone.wait()

    async def is_gone_within(self, seconds: float) -> bool:
        """Return whether it has exited, now or after at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), seconds)
        return not self.alive

    def kill(self) -> None:
        """Kill the server and its host."""
        if self._process.poll() is None:
            self._process.kill()
            kill_group(self._process.pid)

    async def close(self) -> None:
        """Let the server exit; kill it if it takes longer than a few seconds."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.close()
        if not await self.is_gone_within(_ENDING_SECONDS):
            self.kill()
            await self.is_gone_within(_ENDING_SECONDS)

    def failure(self, request_id: int = 0) -> Failed:
        """Describe how the server ended, from its log."""
        tail = ""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            tail = last_output(file)
        told = next(iter(_TOLD.findall(tail)), "").rstrip(".")
        return Failed(
            request_id=request_id,
            code="worker_died",
            message=f"llama-server crashed: {exit_reason(self._status or 0, tail, told)}.",
            hint=f"Log: {self.log}",
        )


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
