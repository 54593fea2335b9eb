"""A worker process on this machine, spoken to over its stdin and stdout.

The process can die at any moment (an assertion in llama.cpp, the kernel's memory killer, a user's kill -9). Then the
running stream ends with one `Failed(code="worker_died")`, and the next request starts a new worker and loads the
same model again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from cpuchat import paths
from cpuchat.backend.base import GenerateRequest
from cpuchat.protocol import (
    HEADER_SIZE,
    AnyEvent,
    Cancel,
    Command,
    EngineInfo,
    Failed,
    ForgetChat,
    Generate,
    GenerationFinished,
    LoadModel,
    LoadOptions,
    ModelInfo,
    ModelLoaded,
    Shutdown,
    Unloaded,
    WorkerReady,
    decode_event,
    encode,
    frame_length,
)

KEPT_LOGS = 10
SHUTDOWN_SECONDS = 10.0
_ASSERTION = re.compile(r"CPUCHAT-ABORT: *(.+)")


class LocalBackend:
    """See `backend.base.Backend`. Use from one event loop only."""

    def __init__(
        self, *, state_dir: Path | None = None, state_limit: int = 2 << 30, log_dir: Path | None = None
    ) -> None:
        self._state_dir = state_dir
        self._state_limit = state_limit
        self._log_dir = log_dir or paths.log_dir()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._events: asyncio.Queue[AnyEvent] = asyncio.Queue()
        self._request_ids = itertools.count(1)
        self._log: Path | None = None
        self._engine: EngineInfo | None = None
        self._model: ModelInfo | None = None
        self._wanted: tuple[Path, LoadOptions] | None = None
        self._closing = False

    @property
    def model(self) -> ModelInfo | None:
        return self._model

    @property
    def engine(self) -> EngineInfo | None:
        return self._engine

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._alive else None

    @property
    def log_file(self) -> Path | None:
        """What the worker wrote to stderr."""
        return self._log

    @property
    def _alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> Failed | None:
        """Start the worker without a model, to ask for its `engine`; returns what went wrong, if anything did."""
        return await self._ensure_started()

    async def load(self, path: Path, options: LoadOptions) -> AsyncGenerator[AnyEvent, None]:
        self._wanted = (path, options)
        self._model = None
        failure = await self._ensure_started()
        if failure is not None:
            yield failure
            return
        command = LoadModel(
            path=str(path),
            options=options,
            state_dir=str(self._state_dir) if self._state_dir else "",
            state_limit=self._state_limit,
            calibration_dir=str(paths.calibration_dir()),
        )
        async with contextlib.aclosing(self._stream(command, (ModelLoaded, Unloaded, Failed))) as events:
            async for event in events:
                if isinstance(event, ModelLoaded):
                    self._model = event.model
                elif isinstance(event, Failed) and event.code == "worker_died":
                    hint = f"The file may be damaged or too much for this machine: choose another. Log: {self._log}"
                    event = msgspec.structs.replace(event, hint=hint)
                yield event

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[AnyEvent, None]:
        # A worker that was killed since the last answer may be noticed only now: then this request has done no harm
        # and is worth a second try. One that dies again, or after its first event, is reported.
        for is_last in (False, True):
            async with contextlib.aclosing(self._generate(request)) as events:
                first = await anext(events)
                if isinstance(first, Failed) and first.code == "worker_died" and not is_last:
                    continue
                yield first
                async for event in events:
                    yield event
            return

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[AnyEvent, None]:
        if self._model is None or not self._alive:
            if self._wanted is None:
                yield Failed(code="model_not_found", message="No model is loaded.", hint="Choose one first.")
                return
            async with contextlib.aclosing(self.load(*self._wanted)) as events:
                async for event in events:
                    yield event
            if self._model is None:
                return
        command = Generate(
            request_id=next(self._request_ids),
            messages=request.messages,
            prompt=request.prompt,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            stop=request.stop,
            chat_id=request.chat_id,
            speculation=request.speculation,
        )
        async with contextlib.aclosing(self._stream(command, (GenerationFinished, Failed))) as events:
            async for event in events:
                yield event

    async def cancel(self) -> None:
        await self._send(Cancel())

    async def forget(self, chat_id: str) -> None:
        await self._send(ForgetChat(chat_id=chat_id))
        if self._state_dir is not None:
            for file in self._state_dir.glob(f"{paths.kv_stem(chat_id)}-*"):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)

    async def close(self) -> None:
        self._closing = True
        process = self._process
        if process is None:
            return
        await self._send(Shutdown())
        try:
            await asyncio.wait_for(process.wait(), SHUTDOWN_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._reader is not None:
            await self._reader
        self._process = None
        self._model = None

    async def _stream(self, command: Command, final: tuple[type, ...]) -> AsyncGenerator[AnyEvent, None]:
        """Send, then yield events up to and including the final one; closed early, it cancels and drains."""
        await self._send(command)
        finished = False
        try:
            while not finished:
                event = await self._events.get()
                finished = isinstance(event, final)
                yield event
        finally:
            if not finished:
                await self._send(Cancel())
                while not isinstance(await self._events.get(), final):
                    pass

    async def _send(self, command: Command) -> None:
        process = self._process
        if process is None or process.stdin is None or not self._alive:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(encode(command))
            await process.stdin.drain()

    async def _ensure_started(self) -> Failed | None:
        if self._alive:
            return None
        if self._reader is not None:
            await self._reader
        self._events = asyncio.Queue()
        self._log = self._new_log()
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "cpuchat.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment(),
            )
        self._reader = asyncio.create_task(self._read(self._process))
        event = await self._events.get()
        if isinstance(event, WorkerReady):
            self._engine = event.engine
            return None
        return event if isinstance(event, Failed) else Failed(code="error", message=f"Worker began with {event!r}.")

    @staticmethod
    def _environment() -> dict[str, str]:
        # numpy must not start a thread pool of its own beside llama.cpp's.
        return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def _new_log(self) -> Path:
        self._log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        old = sorted(self._log_dir.glob("worker-*.log"), key=lambda file: file.name)
        for file in old[: max(0, len(old) - KEPT_LOGS + 1)]:
            file.unlink(missing_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return self._log_dir / f"worker-{stamp}-{os.getpid()}-{time.monotonic_ns() % 1_000_000:06}.log"

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Turn frames into events until the worker ends, then say how it ended."""
        assert process.stdout is not None
        broken = ""
        try:
            while True:
                body = await process.stdout.readexactly(frame_length(await process.stdout.readexactly(HEADER_SIZE)))
                self._events.put_nowait(decode_event(body))
        except asyncio.IncompleteReadError:
            pass
        except (ValueError, msgspec.MsgspecError) as error:
            broken = f"it sent something unreadable ({error})"
            process.kill()
        status = await process.wait()
        self._model = None
        if not self._closing:
            self._events.put_nowait(self._epitaph(status, broken))

    def _epitaph(self, status: int, broken: str) -> Failed:
        """One message for a death: llama.cpp's assertion if it left one, else the signal in plain words."""
        hint = f"Your next message starts it again. Log: {self._log}"
        tail = ""
        if self._log is not None:
            with contextlib.suppress(OSError):
                tail = self._log.read_bytes()[-16_384:].decode("utf-8", "replace")
        if assertion := _ASSERTION.findall(tail):
            reason = f"llama.cpp stopped on an internal check: {assertion[-1].strip()}"
        elif broken:
            reason = broken
        elif status == -signal.SIGKILL:
            reason = "it was killed (kill -9, or by the kernel because memory ran out)"
        elif status < 0:
            reason = f"it ended by {signal.Signals(-status).name}"
        else:
            reason = f"it ended with status {status}"
        return Failed(code="worker_died", message=f"The inference worker is gone: {reason}.", hint=hint)
