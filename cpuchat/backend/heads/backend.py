"""A model with a draft head as a backend: a llama-server of cpuchat's own, with the cores and the memory policy of a
worker, spoken to as to any other llama-server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cpuchat.backend.base import ModelBackend
from cpuchat.backend.heads.server import LlamaServerProcess, ServerDraftOptions, ServerPlan
from cpuchat.backend.process import Spawner
from cpuchat.backend.remote.keys import KeyRing
from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, Interrupted, ServerUnreachable, WorkerDied
from cpuchat.config.servers import ServerModel
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.heads import ENGINE
from cpuchat.protocol.messages import (
    AnyEvent,
    Failed,
    Generate,
    GenerationFinished,
    LoadCancelled,
    LoadOptions,
    LoadProgress,
    ModelLoaded,
)
from cpuchat.protocol.model_info import EngineInfo

if TYPE_CHECKING:
    from cpuchat.backend.remote.backend import RemoteBackend


class OwnKey(KeyRing):
    """A key ring with one key, whatever the server."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._own = key

    def key(self, server: str) -> str:
        return self._own


_GONE_SECONDS = 1.0
"""Seconds in which a process whose connection broke is seen to have exited."""
_CLOSED = Failed(code=Interrupted.code, message="llama-server was closed.")


class HeadBackend(ModelBackend[LlamaServerProcess]):
    """See `backend.base.Backend`. Nothing of a chat stays after the server has exited: `forget` has nothing to delete.

    `spawner` starts the server, as it does workers: their priority must not be that of the user interface.
    """

    def __init__(self, spawner: Spawner) -> None:
        super().__init__()
        self._spawner, self._log_dir = spawner, paths.log_dir()
        self._remote: RemoteBackend | None = None
        self._plan: ServerPlan | None = None
        self.log_file: Path | None = None

    async def _load(self, path: Path, options: LoadOptions, spec: PlacementSpec) -> AsyncGenerator[AnyEvent, None]:
        """Start a llama-server for `path` with the head that `options` name; `path` itself is the one it contains."""
        self._model = None
        await self._stop()
        try:
            self._plan = plan = await asyncio.to_thread(ServerPlan.of, path, options, spec)
            if self._cancelled.is_set():
                yield _CLOSED if self._closed else LoadCancelled()
                return
            memory = plan.placement.memory_policy.words
            self._process = server = await LlamaServerProcess.start(self._spawner, self._log_dir, plan.server, memory)
        except CpuchatError as error:
            yield Failed.of(error)
            return
        except OSError as error:
            yield Failed(code=WorkerDied.code, message=f"Cannot start llama-server: {error}.")
            return
        self.log_file = server.log
        if self._closed:  # meanwhile
            await self._stop()
            yield _CLOSED
            return
        try:
            yield LoadProgress(phase="waiting", done=0, total=1)
            if not await self._until_cancelled(server.listening()):
                yield LoadCancelled() if self._stopped else self._ending(server)
                return
            async with contextlib.aclosing(self._connect(server, plan)) as events:
                async for event in events:
                    yield event
        finally:
            if self._model is None:
                await self._stop()

    async def _connect(self, server: LlamaServerProcess, plan: ServerPlan) -> AsyncGenerator[AnyEvent, None]:
        """Wait until the server has loaded its model, and describe that."""
        from cpuchat.backend.remote.backend import RemoteBackend

        remote = self._remote = RemoteBackend(OwnKey(server.key))
        source = ServerModel(server.url)
        async with (
            self._watched(server, remote),
            contextlib.aclosing(remote.load(source, plan.server.options)) as events,
        ):
            async for event in events:
                match event:
                    case ModelLoaded():
                        memory = plan.placement.memory_policy.words
                        self.engine = EngineInfo(version=ENGINE, pid=server.pid or 0, memory_policy=memory)
                        self._model = plan.described(event.model)
                        yield ModelLoaded(model=self._model)
                    case LoadProgress():
                        pass
                    case Failed() | LoadCancelled() if await server.is_gone_within(_GONE_SECONDS * (not self._stopped)):
                        yield self._ending(server)
                    case _:
                        yield event

    @property
    def _stopped(self) -> bool:
        return self._cancelled.is_set() and not self._closed

    @contextlib.asynccontextmanager
    async def _watched(self, server: LlamaServerProcess, remote: RemoteBackend) -> AsyncGenerator[None, None]:
        """Stop waiting for the server once its process has exited: nothing will come."""

        async def watch() -> None:
            await server.finished()
            await remote.cancel()

        watching = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            watching.cancel()

    def _ending(self, server: LlamaServerProcess, request_id: int = 0) -> Failed:
        if self._closed:
            return msgspec.structs.replace(_CLOSED, request_id=request_id)
        return server.crash(request_id=request_id)

    def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        if self._wanted is not None:
            path, options, spec = self._wanted
            self._wanted = path, msgspec.structs.replace(options, speculation=request.speculation), spec
        return super().generate(request)

    def _is_ready(self, request: Generate) -> bool:
        """Return whether the server runs, and was started for this kind of drafting."""
        if self.model is None or self._plan is None:
            return False
        server = self._plan.server
        return server.drafting == ServerDraftOptions.of(request.speculation, server.kind)

    async def _generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        async with contextlib.aclosing(self._until_ready(request)) as events:
            async for event in events:
                yield event
        server, remote = self._process, self._remote
        if server is None or remote is None or self._model is None or self._cancelled.is_set():
            return
        async with (
            self._watched(server, remote),
            # Its own defaults are not those of this app.
            contextlib.aclosing(remote.generate(msgspec.structs.replace(request, unset=()))) as events,
        ):
            async for event in events:
                match event:
                    case LoadProgress() | ModelLoaded():
                        pass  # of the connection, not of the model
                    case Failed() if not server.alive or (
                        event.code == ServerUnreachable.code and await server.is_gone_within(_GONE_SECONDS)
                    ):
                        yield self._ending(server, event.request_id)
                    case GenerationFinished() if not server.alive:
                        yield self._ending(server, event.request_id)
                    case _:
                        yield event

    async def cancel(self) -> None:
        await super().cancel()
        if self._remote is not None:
            await self._remote.cancel()

    async def end_reasoning(self) -> bool:
        return self._remote is not None and await self._remote.end_reasoning()

    async def unload(self) -> None:
        await self._stop()

    def kill(self) -> None:
        self._closed = True
        self._cancelled.set()
        if self._process is not None:
            self._process.kill()
        if self._remote is not None:
            self._remote.kill()

    async def close(self) -> None:
        self._closed = True
        self._cancelled.set()
        self._model = None
        await self._stop()

    async def _stop(self) -> None:
        remote, self._remote = self._remote, None
        server, self._process = self._process, None
        if remote is not None:
            await remote.close()
        if server is not None:
            await server.close()
