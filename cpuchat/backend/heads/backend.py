"""A model with a draft head as a backend: a llama-server of cpuchat's own, with the cores and the memory policy of a
worker, spoken to as to any other llama-server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cpuchat import paths
from cpuchat.backend.base import DEFAULT_PLACEMENT
from cpuchat.backend.heads.options import Drafting, ServerOptions
from cpuchat.backend.heads.process import ServerProcess, free_port
from cpuchat.backend.placing import place_here
from cpuchat.backend.process import Spawner
from cpuchat.errors import CpuchatError, DoesNotFit, EngineMissing, Interrupted, ServerUnreachable, WorkerDied
from cpuchat.hardware.memory import available_bytes
from cpuchat.hardware.placement.placement import Placement, PlacementSpec
from cpuchat.models.fingerprint import file_fingerprint
from cpuchat.models.fit import check_fit, choose_context, draft_memory, layers_elsewhere, required_memory
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.heads import ENGINE, HeadKind, find_program, require_head, title
from cpuchat.protocol import (
    AnyEvent,
    EngineInfo,
    Failed,
    Generate,
    GenerationFinished,
    LoadCancelled,
    LoadOptions,
    LoadProgress,
    ModelInfo,
    ModelLoaded,
    ServerLoad,
    Speculation,
)
from cpuchat.servers import ServerModel, Source
from cpuchat.telemetry import units
from cpuchat.telemetry.units import gigabytes
from cpuchat.timings import Timings

if TYPE_CHECKING:
    from cpuchat.backend.remote.backend import RemoteBackend

_REACH_SECONDS = 5.0
_GONE_SECONDS = 1.0
"""Seconds in which a process whose connection broke is seen to have exited."""
_MOST_CACHE_MIB = 8192  # llama-server's own limit
_CLOSED = Failed(code=Interrupted.code, message="llama-server was closed.")


class HeadBackend:
    """See `backend.base.Backend`. Nothing of a chat stays after the server has exited: `forget` has nothing to delete.

    `spawner` starts the server, as it does workers: their priority must not be that of the user interface.
    """

    def __init__(self, spawner: Spawner, log_dir: Path | None = None) -> None:
        self._spawner, self._log_dir = spawner, log_dir or paths.log_dir()
        self._server: ServerProcess | None = None
        self._remote: RemoteBackend | None = None
        self._model: ModelInfo | None = None
        self._wanted: tuple[Path, LoadOptions, PlacementSpec] | None = None
        self._plan: _Plan | None = None
        self._cancelled = asyncio.Event()
        self._closed = False
        self.engine: EngineInfo | None = None
        self.log_file: Path | None = None

    @property
    def model(self) -> ModelInfo | None:
        return self._model if self._is_alive else None

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server is not None and self._server.alive else None

    @property
    def _is_alive(self) -> bool:
        return self._server is not None and self._server.alive

    def load(
        self, path: Source, options: LoadOptions, spec: PlacementSpec = DEFAULT_PLACEMENT
    ) -> AsyncGenerator[AnyEvent, None]:
        """Start a llama-server for `path` with the head `options.draft_path`; `path` itself is the one it contains."""
        assert isinstance(path, Path)
        self._cancelled.clear()
        return self._load(path, options, spec)

    async def _load(self, path: Path, options: LoadOptions, spec: PlacementSpec) -> AsyncGenerator[AnyEvent, None]:
        self._wanted, self._model = (path, options, spec), None
        await self._stop()
        try:
            self._plan = plan = await asyncio.to_thread(_Plan.of, path, options, spec)
            if self._closed:
                yield _CLOSED
                return
            if plan.server.rpc_layers:
                await _require_reachable(options.rpc)
            memory = plan.placement.memory.words
            self._server = server = await ServerProcess.start(self._spawner, self._log_dir, plan.server, memory)
        except CpuchatError as error:
            yield Failed(code=error.code, message=error.message, hint=error.hint)
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
            if not await self._until_cancelled(server):
                yield LoadCancelled() if self._cancelled.is_set() and not self._closed else self._ending(server)
                return
            async with contextlib.aclosing(self._connect(server, plan)) as events:
                async for event in events:
                    yield event
        finally:
            if self._model is None:
                await self._stop()

    async def _until_cancelled(self, server: ServerProcess) -> bool:
        """Wait until the server listens; False when it ended, or the user stopped the load."""
        listening = asyncio.ensure_future(server.listening())
        stop = asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait({listening, stop}, return_when=asyncio.FIRST_COMPLETED)
            return listening.done() and listening.result() and not self._cancelled.is_set()
        finally:
            listening.cancel()
            stop.cancel()

    async def _connect(self, server: ServerProcess, plan: _Plan) -> AsyncGenerator[AnyEvent, None]:
        """Wait until the server has loaded its model, and describe that."""
        from cpuchat.backend.heads.key import OwnKey  # httpx takes its time
        from cpuchat.backend.remote.backend import RemoteBackend

        remote = self._remote = RemoteBackend(OwnKey(server.key))
        source = ServerModel(server.url)
        async with (
            self._watched(server, remote),
            contextlib.aclosing(remote.load(source, plan.options)) as events,
        ):
            async for event in events:
                match event:
                    case ModelLoaded():
                        memory = plan.placement.memory.words
                        self.engine = EngineInfo(version=ENGINE, pid=server.pid or 0, memory=memory)
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
    async def _watched(self, server: ServerProcess, remote: RemoteBackend) -> AsyncGenerator[None, None]:
        """Stop waiting for the server once its process has exited: nothing will come."""

        async def watch() -> None:
            await server.finished()
            await remote.cancel()

        watching = asyncio.ensure_future(watch())
        try:
            yield
        finally:
            watching.cancel()

    def _ending(self, server: ServerProcess, request_id: int = 0) -> Failed:
        """Return why the server is gone."""
        if self._closed:
            return msgspec.structs.replace(_CLOSED, request_id=request_id)
        return server.failure(request_id)

    def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        self._cancelled.clear()
        return self._generate(request)

    async def _generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        if self._wanted is None:
            yield Failed(code="model_not_found", message="No model is loaded.", hint="Choose one first.")
            return
        if not self._is_alive or self._model is None or not self._drafts_as(request.speculation):
            path, options, spec = self._wanted
            self._wanted = path, msgspec.structs.replace(options, speculation=request.speculation), spec
            async with contextlib.aclosing(self._load(*self._wanted)) as events:
                async for event in events:
                    if not isinstance(event, LoadCancelled):
                        yield event
            if self._cancelled.is_set():
                yield GenerationFinished(request_id=request.request_id, stop_reason="cancelled", timings=Timings())
                return
        server, remote = self._server, self._remote
        if server is None or remote is None or self._model is None:
            return  # the failure was reported
        async with (
            self._watched(server, remote),
            contextlib.aclosing(remote.generate(request)) as events,
        ):
            async for event in events:
                match event:
                    case LoadProgress() | ModelLoaded() | ServerLoad():
                        pass  # of the connection, not of the model
                    case Failed() if not server.alive or (
                        event.code == ServerUnreachable.code and await server.is_gone_within(_GONE_SECONDS)
                    ):
                        yield self._ending(server, event.request_id)
                    case GenerationFinished() if not server.alive:
                        yield self._ending(server, event.request_id)
                    case GenerationFinished():  # on this machine there is neither a network nor a queue
                        timings = msgspec.structs.replace(event.timings, network_ms=None, queue_ms=None)
                        yield msgspec.structs.replace(event, timings=timings)
                    case _:
                        yield event

    def _drafts_as(self, wanted: Speculation) -> bool:
        """Return whether the server was started for this kind of drafting; else it has to be started again."""
        plan = self._plan
        return plan is not None and plan.server.drafting == Drafting.of(wanted, plan.kind)

    async def cancel(self) -> None:
        self._cancelled.set()
        if self._remote is not None:
            await self._remote.cancel()

    async def end_reasoning(self) -> bool:
        return self._remote is not None and await self._remote.end_reasoning()

    async def count_tokens(self, text: str) -> int | None:
        """Return None: the server is not asked."""
        return None

    async def forget(self, chat_id: str) -> None:
        """Do nothing: the server saves no chats."""

    async def unload(self) -> None:
        await self._stop()

    def kill(self) -> None:
        self._closed = True
        self._cancelled.set()
        if self._server is not None:
            self._server.kill()
        if self._remote is not None:
            self._remote.kill()

    async def close(self) -> None:
        self._closed = True
        self._cancelled.set()
        self._model = None
        await self._stop()

    async def _stop(self) -> None:
        """Disconnect and let the server exit."""
        remote, self._remote = self._remote, None
        server, self._server = self._server, None
        if remote is not None:
            await remote.close()
        if server is not None:
            await server.close()


async def _require_reachable(workers: tuple[str, ...]) -> None:
    """Raise ServerUnreachable for the first RPC worker that cannot be reached: llama-server would abort."""
    for worker in workers:
        host, _, port = worker.rpartition(":")
        try:
            async with asyncio.timeout(_REACH_SECONDS):
                _, writer = await asyncio.open_connection(host, int(port))
        except OSError as error:  # TimeoutError is one
            why = os.strerror(error.errno) if error.errno else "no answer"
            hint = f"Start it there: cpuchat serve --rpc-worker --host ADDRESS --port {port}."
            raise ServerUnreachable(f"Cannot reach the RPC worker {worker}: {why}.", hint) from None
        writer.close()


def _fit(header: GGUFHeader, head: GGUFHeader | None, options: LoadOptions) -> tuple[int, int, int]:
    """Return the context, how many layers the RPC workers hold, and the bytes that are left here beside the rest.

    Raises:
        DoesNotFit: all of it, or what stays here, does not fit.
    """
    available = available_bytes()
    n_ctx = choose_context(header, options, sys.maxsize if options.rpc else available)
    beside = draft_memory(head, options, n_ctx) if head is not None else None
    if beside is not None and not options.rpc:
        n_ctx = choose_context(header, options, available - beside.least)
    need = required_memory(header, options, n_ctx)
    taken = need.least + (beside.least if beside is not None else 0)
    if not options.rpc:
        check_fit(need, available, header, options, beside)
        return n_ctx, 0, available - taken
    layers, elsewhere = layers_elsewhere(header, options, n_ctx, taken - available)
    if taken - elsewhere > available:
        raise DoesNotFit(
            f"Not enough memory: {gigabytes(taken - elsewhere)} GB stay here with {layers} layers on the RPC workers, "
            f"and {gigabytes(available)} GB are available.",
            "Give the workers more layers (--rpc-layers), or use a smaller --ctx.",
        )
    return n_ctx, layers, available - taken + elsewhere


class _Plan(msgspec.Struct, frozen=True):
    """What a load needs to know of the files and of the machine. `head` is None for one that the model contains."""

    path: Path
    options: LoadOptions
    placement: Placement
    kind: HeadKind | None
    header: GGUFHeader
    head: GGUFHeader | None
    server: ServerOptions
    fingerprint: str

    @classmethod
    def of(cls, path: Path, options: LoadOptions, spec: PlacementSpec) -> _Plan:
        """Read the files and choose the cores. Blocks.

        Raises:
            EngineMissing: there is no llama-server, or none for RPC workers.
            DraftMismatch: the head does not fit the model.
            DoesNotFit: both do not fit into memory.
            ModelNotFound, ModelDamaged, ModelUnsupported: a file cannot be read.
            UsageError: a placement that this machine does not allow.
        """
        draft = Path(options.draft_path) if options.draft_path else None
        kind = require_head(path, draft) if draft is not None else None
        program, placement, header = find_program(), place_here(spec, with_draft=False), read_model(path)
        if options.rpc and not program:
            raise EngineMissing(
                "RPC workers need a llama-server on PATH; the one in the wheel has no RPC.",
                "Build llama.cpp with `cmake -DGGML_RPC=ON`, and put its bin folder on PATH.",
            )
        head = read_model(draft) if draft is not None and kind is not None and draft != path else None
        n_ctx, layers, spare = _fit(header, head, options)
        server = ServerOptions(
            program=program,
            model=str(header.path.absolute()),
            head=str(head.path.absolute()) if head is not None else "",
            kind=kind,
            drafting=Drafting.of(options.speculation, kind),
            port=free_port(),
            n_ctx=n_ctx,
            rpc_layers=layers,
            cache_mib=min(spare // 4 >> 20, _MOST_CACHE_MIB),
            cpus=placement.cpus,
            options=options,
        )
        return cls(path, options, placement, kind, header, head, server, file_fingerprint(path))

    def described(self, model: ModelInfo) -> ModelInfo:
        """Return the model that the server describes as one of this machine."""
        placement, head = self.placement, self.head
        named = title(self.kind) if self.kind is not None else ""
        return msgspec.structs.replace(
            model,
            path=str(self.path),
            name=self.header.name,
            architecture=self.header.architecture,
            quantization=self.header.quantization,
            size=self.header.file_size,
            n_layer=self.header.n_layer,
            has_template=bool(self.header.chat_template),
            n_threads=len(placement.cpus),
            cpus=placement.cpus,
            cores_reason=placement.reason,
            fingerprint=self.fingerprint,
            draft=head.path.stem if head is not None else named,
            draft_quantization=head.quantization if head is not None else "",
            notes=(*placement.notes, *self._notes(named), *model.notes),
            server="",
            engine=ENGINE,
            no_speculation="",
            unreported=(),
        )

    def _notes(self, head: str) -> list[str]:
        """Return who answers, and what of the options has no effect."""
        options, layers = self.options, self.server.rpc_layers
        drafts = f", which drafts with its {head}" if head else ""
        notes = [f"Answered by {ENGINE}{drafts}."]
        if options.draft_path and not head:
            notes.append(f"{Path(options.draft_path).name} is not used: with RPC workers, only draft heads are.")
        if layers:
            notes.append(f"{units.plural(layers, 'layer')} of {self.header.n_layer} on {', '.join(options.rpc)}.")
        return notes
