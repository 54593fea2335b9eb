"""A Python process of this package that takes requests and gives answers as lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Sequence
from typing import IO, Any, BinaryIO, Generic, Self, TypeVar

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, from_code
from cpuchat.base.processes import child_environment, exit_reason, last_output

_LINE_LIMIT = 64 << 20
_GRACE_SECONDS = 1.0

A = TypeVar("A")


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The answer to a request that failed. `code` as in errors.py."""

    code: str
    message: str
    hint: str = ""


class LineOutput:
    """Writes the answers of a `LineProcess`, one per line."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    @classmethod
    def claim(cls) -> LineOutput:
        """Keep stdout for answers; libraries print to stderr then. Ignores Ctrl+C: the parent decides what it means."""
        output = cls(os.fdopen(os.dup(1), "wb"))
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return output

    def send(self, answer: msgspec.Struct) -> None:
        self._stream.write(msgspec.json.encode(answer) + b"\n")
        self._stream.flush()

    def refuse(self, error: CpuchatError) -> None:
        """Answer that the request failed."""
        self.send(Refused(code=error.code, message=error.message, hint=error.hint))


class LineProcess(Generic[A]):
    """An async context manager around the process that `command` starts; leaving it ends the process. `name` is what
    messages call it ("quantizing process"), `answers` the type of its answers, a union of tagged structs without
    `Refused`; `failure` is raised when it ends without an answer. `environment`: variables beside those of
    `child_environment`."""

    def __init__(
        self, command: Sequence[str], name: str, answers: Any, failure: type[CpuchatError], /, **environment: str
    ) -> None:
        self._command = command
        self._name = name
        self._decoder = msgspec.json.Decoder(prepared(answers | Refused))
        self._failure = failure
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._files = contextlib.ExitStack()
        self._errors: IO[bytes] | None = None

    async def __aenter__(self) -> Self:
        with contextlib.ExitStack() as files:
            pipe = asyncio.subprocess.PIPE
            try:
                self._errors = files.enter_context(tempfile.TemporaryFile())
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=pipe, stdout=pipe, stderr=self._errors, limit=_LINE_LIMIT,
                    env=child_environment(**self._environment), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise self._failure(f"Cannot start the {self._name}: {error.strerror}.") from None
            self._files = files.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    @property
    def pid(self) -> int | None:
        """Return its PID; None before it is started and when it has ended."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def end(self) -> None:
        """Terminate it, kill it if that takes too long, and wait until it has ended. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        ended = asyncio.ensure_future(process.communicate())
        try:
            await asyncio.wait({ended}, timeout=_GRACE_SECONDS)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await ended  # also when this is cancelled: a killed process ends at once
            self._files.close()

    async def send(self, request: msgspec.Struct) -> None:
        """Send a request; its answers come from `receive`."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        with contextlib.suppress(ConnectionError):  # it has ended: `receive` says why
            await self._process.stdin.drain()

    async def receive(self) -> A:
        """Return the next answer; cancelling loses none. Raises what it reported, or `failure` if it ended without."""
        assert self._process is not None and self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            answer = self._decoder.decode(line) if line.endswith(b"\n") else None
        except ValueError as error:  # too long or malformed
            raise self._failure(f"The {self._name} sent an invalid answer: {error}.") from None
        if answer is None:
            # llama.cpp's assertion if there is one, else the signal or the last line of its log.
            assert self._errors is not None
            status = await self._process.wait()
            said = last_output(self._errors)
            reason = exit_reason(status, said, said.splitlines()[-1] if said and status != -signal.SIGKILL else "")
            raise self._failure(f"The {self._name} ended: {reason}.")
        if isinstance(answer, Refused):
            raise from_code(answer.code, answer.message, answer.hint)
        return answer
