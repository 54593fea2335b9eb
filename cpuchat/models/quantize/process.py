"""The process that quantizes, seen from the program that started it."""

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
    """An async context manager; leaving it ends the process, whatever it is at."""

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
                raise QuantizeFailed(f"The process that quantizes does not start: {error.strerror}.") from None
            self._files = files.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    async def end(self) -> None:
        """Kill it and wait until it is gone. Doing it again does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
        self._files.close()

    async def ask(self, request: Request) -> None:
        """Send a request; its answers come from `answer`."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        with contextlib.suppress(ConnectionError):  # it is gone: `answer` tells why
            await self._process.stdin.drain()

    async def answer(self) -> Answer:
        """The next answer. Cancelling this loses none.

        Raises:
            QuantizeFailed: the process ended without one.
            CpuchatError: it refused.
        """
        assert self._process is not None and self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            answer = msgspec.json.decode(line, type=Answer) if line.endswith(b"\n") else None
        except ValueError as error:  # longer than any answer, or not one
            raise QuantizeFailed(f"The process that quantizes answered something unreadable: {error}.") from None
        if answer is None:
            raise QuantizeFailed(f"The process that quantizes is gone: {await self._epitaph()}.")
        if isinstance(answer, Refused):
            raise from_code(answer.code, answer.message, answer.hint)
        return answer

    async def _epitaph(self) -> str:
        """How it ended: llama.cpp's assertion if it left one, else the signal or what it said last."""
        assert self._process is not None and self._errors is not None
        status = await self._process.wait()
        self._errors.seek(max(self._errors.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        said = self._errors.read().decode("utf-8", "replace").strip()
        if assertion := _ASSERTION.findall(said):
            return f"llama.cpp stopped on an internal check: {assertion[-1].strip()}"
        if status == -signal.SIGKILL:
            return "it was killed (kill -9, or by the kernel because memory ran out)"
        return said.splitlines()[-1] if said else f"it ended with status {status}"
