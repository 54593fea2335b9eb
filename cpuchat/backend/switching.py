"""One backend for models on this machine and on servers: whoever uses it does not see which of them answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from cpuchat.backend.base import DEFAULT_PLACEMENT, Backend
from cpuchat.backend.local import LocalBackend
from cpuchat.config.servers import KeyRing, ServerModel, Source
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import AnyEvent, Failed, Generate, LoadOptions, Measure, Measured
from cpuchat.protocol.model_info import EngineInfo, ModelInfo

if TYPE_CHECKING:
    from cpuchat.backend.remote.backend import RemoteBackend


class SwitchingBackend:
    """See `backend.base.Backend`. A load decides who answers from then on; the other one gives its memory back."""

    def __init__(self, local: LocalBackend | None = None, keys: KeyRing | None = None) -> None:
        self.local = local or LocalBackend()
        self._keys = keys
        self._remote: RemoteBackend | None = None
        self._current: Backend = self.local

    @property
    def model(self) -> ModelInfo | None:
        return self._current.model

    @property
    def engine(self) -> EngineInfo | None:
        return self._current.engine

    @property
    def pid(self) -> int | None:
        return self._current.pid

    def load(
        self, path: Source, options: LoadOptions, spec: PlacementSpec = DEFAULT_PLACEMENT
    ) -> AsyncGenerator[AnyEvent, None]:
        before, self._current = self._current, self._server if isinstance(path, ServerModel) else self.local
        stream = self._current.load(path, options, spec)  # at once: a cancel may come before the first event
        return stream if before is self._current else self._load_after(before, stream)

    async def _load_after(
        self, before: Backend, stream: AsyncGenerator[AnyEvent, None]
    ) -> AsyncGenerator[AnyEvent, None]:
        async with contextlib.aclosing(stream) as events:
            await before.unload()
            async for event in events:
                yield event

    @property
    def _server(self) -> RemoteBackend:
        if self._remote is None:
            from cpuchat.backend.remote.backend import RemoteBackend

            self._remote = RemoteBackend(self._keys)
        return self._remote

    def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        return self._current.generate(request)

    async def end_reasoning(self) -> bool:
        return await self._current.end_reasoning()

    async def count_tokens(self, of: str | Generate) -> int | None:
        return await self._current.count_tokens(of)

    async def measure(self, request: Measure) -> Measured | Failed:
        return await self._current.measure(request)

    async def cancel(self) -> None:
        await self._current.cancel()

    async def forget(self, chat_id: str) -> None:
        await self.local.forget(chat_id)

    async def unload(self) -> None:
        await self._current.unload()

    def kill(self) -> None:
        self.local.kill()
        if self._remote is not None:
            self._remote.kill()

    async def close(self) -> None:
        await self.local.close()
        if self._remote is not None:
            await self._remote.close()
