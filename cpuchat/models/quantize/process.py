"""Starts and talks to the quantizing process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import tempfile
from types import TracebackType
from typing import IO

import msgspec

from cpuchat.children import child_environment, python_command
from cpuchat.errors import QuantizeFailed, from_code
from cpuchat.models.quantize.messages import Answer, Refused, Request

_LINE_LIMIT = 64 << 20  # one answer names all tensors
_TAIL_BYTES = 16_384
_ASSERTION = re.compile(r"CPUCHAT-ABORT: *(.+)")


class QuantizeProcess:
    """An async context manager; leaving it kills the process."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._files = contextlib.ExitStack()
        self._errors: IO[bytes] | None = None

    async def __aenter__(self) -> QuantizeProcess:
        with contextlib.ExitStack() as files:
            self._errors = files.enter_context(tempfile.TemporaryFile())
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *python_command("-m", "cpuchat.engine.quantize"), stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE, stderr=self._errors, limit=_LINE_LIMIT, env=child_environment(),
                )  # fmt: skip
            except OSError as error:
                raise QuantizeFailed(f"Cannot start the quantizing process: {error.strerror}.") from None
            self._files = files.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    async def end(self) -> None:
        """Kill it and wait until it has ended. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
        self._files.close()

    async def send(self, request: Request) -> None:
        """Send a request; its answers come from `receive`."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        with contextlib.suppress(ConnectionError):  # it has ended: `receive` says why
            await self._process.stdin.drain()

    async def receive(self) -> Answer:
        """Return the next answer. Cancelling this loses none.

        Raises:
            QuantizeFailed: the process ended without one.
            CpuchatError: it reported a failure.
        """
        assert self._process is not None and self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            answer = msgspec.json.decode(line, type=Answer) if line.endswith(b"\n") else None
        except ValueError as error:  # too long or malformed
            raise QuantizeFailed(f"The quantizing process sent an invalid answer: {error}.") from None
        if answer is None:
            raise QuantizeFailed(f"The quantizing process ended: {await self._exit_failure()}.")
        if isinstance(answer, Refused):
            raise from_code(answer.code, answer.message, answer.hint)
        return answer

    async def _exit_failure(self) -> str:
        """Return why it ended: llama.cpp's assertion if there is one, else the signal or the last line of its log."""
        assert self._process is not None and self._errors is not None
        status = await self._process.wait()
        self._errors.seek(max(self._errors.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        said = self._errors.read().decode("utf-8", "replace").strip()
        if assertion := _ASSERTION.findall(said):
            return f"assertion failed in llama.cpp: {assertion[-1].strip()}"
        if status == -signal.SIGKILL:
            return "killed (kill -9, or by the OOM killer)"
        return said.splitlines()[-1] if said else f"exit status {status}"
