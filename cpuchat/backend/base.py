"""The interface of a backend: what a chat needs to get answers; and where the engines of this machine compute."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, Protocol, TypeVar

import msgspec

from cpuchat.backend.process import WorkerProcess
from cpuchat.config.servers import Source
from cpuchat.hardware.numa.mempolicy import current
from cpuchat.hardware.placement.placement import Placement, PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.protocol.messages import (
    AnyEvent,
    Failed,
    Generate,
    GenerationFinished,
    LoadCancelled,
    LoadOptions,
    Measure,
    Measured,
    ModelLoaded,
)
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.timings import Timings

DEFAULT_PLACEMENT = PlacementSpec()
NO_MODEL = Failed(code="model_not_found", message="No model is loaded.", hint="Choose one first.")


class Backend(Protocol):
    """Answers requests, `model.parallel` at a time; more wait in order. A failure of the engine is yielded as `Failed`.

    `model` is None before a load and after the worker crashed; `engine` before the first start, and for a model on a
    server; `pid` is that of the computing process, None when it is remote or not running."""

    @property
    def model(self) -> ModelInfo | None: ...

    @property
    def engine(self) -> EngineInfo | None: ...

    @property
    def pid(self) -> int | None: ...

    def load(
        self, path: Source, options: LoadOptions, spec: PlacementSpec = DEFAULT_PLACEMENT
    ) -> AsyncGenerator[AnyEvent, None]:
        """Start a worker if needed and load the model with the placement `spec`; or connect to the server of the model.
        Ends with `ModelLoaded`, `LoadCancelled` or `Failed`."""
        ...

    def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        """Stream one answer; ends with `GenerationFinished` or `Failed`. Closing the iterator early cancels this answer
        only. After the worker has died, it is started and the model loaded again first, with its `LoadProgress`
        events."""
        ...

    async def cancel(self) -> None:
        """Stop the load or answer that runs or was requested last; its iterator still ends with its final event."""

    async def end_reasoning(self) -> bool:
        """Let the model end its reasoning and answer now; False when it is not reasoning, or the engine cannot."""
        ...

    async def count_tokens(self, of: str | Generate) -> int | None:
        """Return how many tokens a text or the prompt of a request has; None where that is not known, or not now."""

    async def measure(self, request: Measure) -> Measured | Failed:
        """Run a measurement with the model loaded here; `cancel` ends it with `Failed(code="interrupted")`."""
        return NO_MODEL

    async def forget(self, chat_id: str) -> None:
        """Delete the saved KV cache of a deleted chat; "" : what is in memory of a chat without a name."""

    async def unload(self) -> None:
        """Let the worker save and exit; the next answer starts it and loads the model again. Nothing may be running."""

    def kill(self) -> None:
        """Kill the worker; unsaved data is lost. Streams end with `Failed`; `close` must still be called."""

    async def close(self) -> None:
        """Let the worker save and exit; kill it if it takes longer than a few seconds."""


_T = TypeVar("_T")


class ModelBackend(Backend, ABC):
    """A backend of its own kind of models: what was asked for, and loading it again when its process is gone."""

    engine: EngineInfo | None = None

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None
        self._model: ModelInfo | None = None
        self._wanted: tuple[Any, LoadOptions, PlacementSpec] | None = None
        self._cancelled = asyncio.Event()
        self._loading = asyncio.Lock()  # one load at a time
        self._loaded: object = None  # the newest load, as `_wanted`
        self._closed = False
        self._request_ids = itertools.count(1)

    @property
    def model(self) -> ModelInfo | None:
        return self._model if self._is_alive else None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.alive else None

    @property
    def _is_alive(self) -> bool:
        return self._process is not None and self._process.alive

    def load(
        self, path: Source, options: LoadOptions, spec: PlacementSpec = DEFAULT_PLACEMENT
    ) -> AsyncGenerator[AnyEvent, None]:
        self._cancelled.clear()  # at once: a cancel may come before the first event is asked for
        self._wanted, self._model = (path, options, spec), None
        return self._load_wanted()

    async def _load_wanted(self) -> AsyncGenerator[AnyEvent, None]:
        """Load what is wanted, unless an answer has loaded just that since it was asked for."""
        async with self._loading:
            assert self._wanted is not None
            if self._is_ready and self._loaded == self._wanted and self._model is not None:
                yield ModelLoaded(model=self._model)
                return
            async with contextlib.aclosing(self._load_now(*self._wanted)) as events:
                async for event in events:
                    yield event

    def _load_now(self, path: Any, options: LoadOptions, spec: PlacementSpec) -> AsyncGenerator[AnyEvent, None]:
        self._loaded = (path, options, spec)
        return self._load(path, options, spec)

    def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        self._cancelled.clear()
        return self._generate(msgspec.structs.replace(request, request_id=next(self._request_ids)))

    async def _until_ready(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        """Load again what is wanted where an answer needs that. Ends with the final event where none can follow:
        nothing is wanted, the load failed, or the user stopped it."""
        if self._wanted is None:
            yield NO_MODEL
            return
        if not self._is_ready:  # else a load may still be telling of its end
            async with self._loading:
                if not self._is_ready:
                    async with contextlib.aclosing(self._load_now(*self._wanted)) as events:
                        async for event in events:
                            if not isinstance(event, LoadCancelled):
                                yield event
        if self._cancelled.is_set():
            yield GenerationFinished(request_id=request.request_id, stop_reason="cancelled", timings=Timings())

    @abstractmethod
    def _load(self, path: Any, options: LoadOptions, spec: PlacementSpec) -> AsyncGenerator[AnyEvent, None]:
        """Load as `Backend.load`."""

    @property
    @abstractmethod
    def _is_ready(self) -> bool:
        """Return whether the loaded model can answer; if not, what is wanted is loaded again."""

    @abstractmethod
    def _generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        """Answer as `Backend.generate`, once what is wanted is loaded (`_until_ready`)."""

    async def _until_cancelled(self, work: Awaitable[_T]) -> _T | None:
        """Return the result of `work`; None when the user stopped it before."""
        working, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() and not self._cancelled.is_set() else None
        finally:
            stop.cancel()
            await ended(working)

    async def cancel(self) -> None:
        self._cancelled.set()

    async def end_reasoning(self) -> bool:
        """Return False: a server is not told."""
        return False


async def ended(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and return when it has ended; an error that came meanwhile is seen."""
    task.cancel()
    if not task.done():  # a loop that ends has cancelled it already, and must not wait
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


def place_here(spec: PlacementSpec) -> Placement:
    """Return the cores and the memory policy for `spec`. Raises UsageError for what this machine does not allow."""
    inherited = current()
    return place(read_topology(), spec, inherits_policy=inherited is None or bool(inherited.places))
