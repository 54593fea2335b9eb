"""Runs a worker process on this machine and talks to it over its stdin and stdout.

The process can die at any moment (an assertion in llama.cpp, the OOM killer, a user's kill -9). Then the running stream
ends with one `Failed(code=WorkerDied.code)`, and the next request starts a new worker and loads the same model again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeGuard, TypeVar

import msgspec

from cpuchat.backend.base import NO_MODEL, ModelBackend, place_here
from cpuchat.backend.process import WORKER_CLOSED, Launch, Spawned, WorkerProcess, log_hint, spawn, watch_over
from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, UsageError, WorkerDied
from cpuchat.config.servers import running_servers
from cpuchat.hardware.placement.placement import Placement, PlacementSpec
from cpuchat.measure.peak import with_peak
from cpuchat.models.cpu_modules import AUTO, installed
from cpuchat.models.gguf.header import model_files
from cpuchat.models.ollama import file_name
from cpuchat.protocol.messages import (
    AnyEvent,
    Cancel,
    Command,
    EndReasoning,
    Failed,
    ForgetChat,
    Generate,
    GenerationFinished,
    LoadCancelled,
    LoadModel,
    LoadOptions,
    Measure,
    Measured,
    ModelLoaded,
    Score,
    TextDelta,
    TokensScored,
    WorkerReady,
)

_FINAL = (ModelLoaded, LoadCancelled, GenerationFinished, Measured, TokensScored, Failed)
_E = TypeVar("_E", Measured, TokensScored)


class LocalBackend(ModelBackend):
    """See `backend.base.Backend`. Use from one event loop only."""

    def __init__(
        self, *, state_dir: Path | None = None, state_limit: int = 2 << 30, log_dir: Path | None = None
    ) -> None:
        super().__init__()
        self._state_dir = state_dir
        self._state_limit = state_limit
        self._log_dir = log_dir or paths.log_dir()
        self._prepared: Future[Spawned] | None = None
        self.resumes = False
        """As of `LoadModel`."""
        self.log_file: Path | None = None
        """The newest worker's stderr; it outlives the worker."""
        self._starting = asyncio.Lock()
        self._sizes: dict[Path, int] = {}  # of the files that are loaded
        self._running: dict[int, _Exchange] = {}  # what the worker is at, the newest last

    def prepare(self, spec: PlacementSpec, cpu_module: str = AUTO) -> None:
        """Start the worker process for a load with this placement and CPU module, before there is an event loop: it
        imports the engine while the caller imports what comes next. `load` tries again, and reports, what fails."""
        self._prepared = spawn(self._log_dir, lambda: _launch(place_here(spec), cpu_module))

    async def start(self, cpu_module: str = AUTO) -> Failed | None:
        """Start the worker without a model, to read its `engine`; returns the error if that failed."""
        return None if self._is_alive else await self._ensure_started(Launch(cpu_module=cpu_module))

    async def _load(self, path: Path, options: LoadOptions, spec: PlacementSpec) -> AsyncGenerator[AnyEvent, None]:
        self._model = None
        self._sizes = await asyncio.to_thread(_file_sizes, path, Path(options.draft_path or path))
        try:
            names = [_transferable(one) for one in (path, self._state_dir or Path())]
            placement = await asyncio.to_thread(place_here, spec)
            launch = await asyncio.to_thread(_launch, placement, options.cpu_module)
        except CpuchatError as error:
            yield Failed.of(error)
            return
        failure = await self._ensure_started(launch)
        if self._cancelled.is_set():  # before there was a worker to tell
            yield LoadCancelled()
            return
        if failure is not None:
            yield failure
            return
        command = LoadModel(
            request_id=next(self._request_ids), path=names[0], cpus=placement.cpus, roams=placement.roams,
            options=options, state_dir=names[1] if self._state_dir else "", state_limit=self._state_limit,
            resumes=self.resumes,
        )  # fmt: skip
        async with self._exchange(command) as exchange:
            while not exchange.finished:
                event = await exchange.next_event()
                if isinstance(event, ModelLoaded):
                    event = await asyncio.to_thread(self._described, event, placement)
                    self._model = event.model
                elif _is_death(event):
                    hint = f"The file may be damaged or too large for this machine. {log_hint(self.log_file)}".strip()
                    event = await self._explained(msgspec.structs.replace(event, hint=hint))
                yield event

    def _described(self, event: ModelLoaded, placement: Placement) -> ModelLoaded:
        """Return `event` with what the parent knows: read bandwidth, placement, unwritable files, running servers."""
        model, notes = event.model, (*placement.notes, *event.model.notes)
        if self.log_file is not None and self.log_file.parent != self._log_dir:
            notes += (
                f"Cannot write to {paths.shown(self._log_dir)}: the log is {self.log_file} instead. Nothing that is "
                "measured is saved.",
            )
        others = [one.url or "in another terminal" for one in running_servers(or_apps=True) if one.pid != os.getpid()]
        if others:
            notes += (f"cpuchat is running too ({', '.join(dict.fromkeys(others))}): they share cores and memory.",)
        model = msgspec.structs.replace(model, notes=notes)
        return ModelLoaded(model=with_peak(model, self.engine.memory_policy if self.engine is not None else ""))

    async def _explained(self, death: Failed) -> Failed:
        """Return how the worker died, with a file that was changed meanwhile: reading what was cut off is a SIGBUS."""
        for file, size in (await asyncio.to_thread(_file_sizes, *self._sizes)).items():
            if size != (loaded := self._sizes.get(file, size)):
                what = f"{file_name(file)} was changed while it was in use: {loaded:,} bytes when loaded, {size:,} now."
                hint = "Restore it or download it again: the next message loads it anew."
                return msgspec.structs.replace(death, message=f"{death.message} {what}", hint=hint)
        return death

    async def _generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        # A worker that was killed since the last answer may be noticed only now: then this request has done no harm
        # and is worth a second try. One that dies again, or after its first event, is reported.
        for is_last in (False, True):
            async with contextlib.aclosing(self._until_ready(request)) as events:
                async for event in events:
                    yield event
            if self._model is None or self._cancelled.is_set():
                return
            told = False
            async with self._exchange(request) as exchange:
                while not exchange.finished:
                    event = await exchange.next_event()
                    if _is_death(event):
                        if not (told or is_last):
                            break
                        event = await self._explained(event)
                    told = True
                    yield event
            if told:
                return

    @property
    def _is_ready(self) -> bool:
        return self.model is not None

    async def measure(self, request: Measure) -> Measured | Failed:
        found = await self._request(request, Measured)
        if self._model is not None and isinstance(found, Measured) and request.calibrates:
            self._model = msgspec.structs.replace(self._model, pass_ms=found.pass_ms)
        return found

    async def score(self, request: Score) -> TokensScored | Failed:
        """Run one command of a scoring job with the loaded model; cancelled as `measure`."""
        return await self._request(request, TokensScored)

    async def _request(self, request: Measure | Score, final: type[_E]) -> _E | Failed:
        if self.model is None:
            return NO_MODEL
        command = msgspec.structs.replace(request, request_id=next(self._request_ids))
        async with self._exchange(command) as exchange:
            while not isinstance(event := await exchange.next_event(), (final, Failed)):
                pass
            return event

    async def cancel(self) -> None:
        await super().cancel()
        if self._process is not None and self._starting.locked():
            self._process.kill()  # it reads nothing before it has started
        elif self._process is not None:
            self._process.wake()
        for running in list(self._running.values())[-1:]:
            running.cancelled = True
            self._send(Cancel(request_id=running.request_id))

    async def end_reasoning(self) -> bool:
        running = list(self._running.values())[-1:]
        if not running or running[0].channel != "reasoning":
            return False
        self._send(EndReasoning(request_id=running[0].request_id))
        return True

    async def count_tokens(self, of: str | Generate) -> int | None:
        """Count as `Backend.count_tokens`; a text only while the worker is not busy."""
        worker = self._process
        if worker is None or self._model is None or (self._running and isinstance(of, str)):
            return None
        return await worker.count_tokens(of)

    async def forget(self, chat_id: str) -> None:
        self._send(ForgetChat(chat_id=chat_id))
        if self._state_dir is not None:
            for file in self._state_dir.glob(f"{paths.kv_stem(chat_id)}-*"):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)

    async def unload(self) -> None:
        worker, self._process = self._process, None
        if worker is not None:
            await worker.close()

    def kill(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.kill()
        if self._prepared is not None:
            self._prepared.add_done_callback(_end_unused)

    async def close(self) -> None:
        self._closed = True
        worker, self._process = self._process, None
        self._model = None
        if worker is not None:
            await worker.close()
        async with self._starting:  # a start in progress sees that it is no longer wanted
            if (prepared := await self._take_prepared()) is not None:
                await _discard(prepared)

    @contextlib.asynccontextmanager
    async def _exchange(self, command: LoadModel | Generate | Measure | Score) -> AsyncIterator[_Exchange]:
        """Send a command and yield its exchange; on an early exit, cancel the command and drain its events."""
        worker = self._process
        assert worker is not None
        watching = None
        with worker.listened_to(command) as events:
            worker.send(command)
            self._running[command.request_id] = exchange = _Exchange(worker, command.request_id, events)
            if isinstance(command, Generate) and self._model is not None:
                longest = max(self._model.pass_ms, default=0.0) / 1e3
                watching = asyncio.create_task(watch_over(worker, lambda: exchange.cancelled, longest))
            try:
                yield exchange
            finally:
                try:
                    if not exchange.finished:
                        exchange.cancelled = True
                        worker.send(Cancel(request_id=command.request_id))
                        while not exchange.finished:
                            await exchange.next_event()
                finally:
                    del self._running[command.request_id]
                    if watching is not None:
                        watching.cancel()

    def _send(self, command: Command) -> None:
        if self._process is not None:
            self._process.send(command)

    async def _ensure_started(self, launch: Launch) -> Failed | None:
        """Start a worker with `launch`; one of another launch saves, exits and is replaced."""
        async with self._starting:
            failure = WORKER_CLOSED if self._closed else await self._start(launch)
            return WORKER_CLOSED if self._closed else failure

    async def _start(self, launch: Launch) -> Failed | None:
        worker, self._process = self._process, None
        if worker is not None and worker.alive:
            if worker.launch == launch:
                self._process = worker
                return None
            await worker.close()
        elif worker is not None:
            await worker.finished()
        if self._closed:
            return WORKER_CLOSED
        worker = await self._take_prepared()
        if worker is not None and worker.launch != launch:
            await _discard(worker)
            worker = None
        try:
            worker = worker or await WorkerProcess.start(self._log_dir, launch)
        except OSError as error:
            return Failed(code=WorkerDied.code, message=f"Cannot start the inference worker: {error}.")
        if self._closed:
            await worker.close()
            return WORKER_CLOSED
        self._process, self.log_file = worker, worker.log
        try:
            event = await worker.events.get()
        except asyncio.CancelledError:
            self._process = None
            worker.kill()
            raise
        if isinstance(event, WorkerReady):
            self.engine = event.engine
            return None
        self._process = None
        await worker.close()  # what could not begin takes no commands, but may wait for some
        if isinstance(event, Failed):
            return event
        return Failed(code="error", message=f"The inference worker started with an unexpected {type(event).__name__}.")

    async def _take_prepared(self) -> WorkerProcess | None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            with contextlib.suppress(CpuchatError, OSError):
                return WorkerProcess(await asyncio.wrap_future(prepared))
        return None


class _Exchange:
    """Reads the events of one command, up to its final one. `channel` is that of the newest text."""

    def __init__(self, worker: WorkerProcess, request_id: int, events: asyncio.Queue[AnyEvent]) -> None:
        self.request_id = request_id
        self._events = events
        self.finished = self.cancelled = False
        self.channel = ""
        self._process = worker

    async def next_event(self) -> AnyEvent:
        """Return the next event of this command, or how the worker ended; what else failed in it is in its log."""
        event = await self._events.get()
        while getattr(event, "request_id", self.request_id) != self.request_id and self._process.alive:
            event = await self._events.get()
        self.channel = event.channel if isinstance(event, TextDelta) else self.channel
        self.finished = isinstance(event, _FINAL)
        return event


def _launch(placement: Placement, cpu_module: str) -> Launch:
    """Return what to start a worker with; an engine that was built for this CPU has no modules to choose from."""
    return Launch(placement.memory_policy.words, cpu_module if installed() else AUTO)


def _file_sizes(*models: Path) -> dict[Path, int]:
    """Return the bytes of each file of these models; 0 of one that is not there."""
    sizes = {part: 0 for model in models for part in model_files(model)}
    for part in sizes:
        with contextlib.suppress(OSError, ValueError):
            sizes[part] = part.stat().st_size
    return sizes


def _end_unused(prepared: Future[Spawned]) -> None:
    if not prepared.cancelled() and prepared.exception() is None:
        process = prepared.result().process
        process.kill()
        process.wait()


async def _discard(worker: WorkerProcess) -> None:
    worker.kill()
    await worker.finished()


def _is_death(event: AnyEvent) -> TypeGuard[Failed]:
    return isinstance(event, Failed) and event.code == WorkerDied.code


def _transferable(path: Path) -> str:
    """Return a path as text for another process. Raises UsageError if it is not valid UTF-8."""
    try:
        return str(path).encode().decode()
    except UnicodeEncodeError:
        name = str(path).encode("utf-8", "replace").decode()
        hint = "Rename the file or its folder; for files of cpuchat's own, set CPUCHAT_CACHE_DIR to another folder."
        raise UsageError(f"The path {name} is not valid UTF-8.", hint) from None
