"""Short words for tests that talk to a real worker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from cpuchat.backend.base import Backend
from cpuchat.backend.local import LocalBackend
from cpuchat.protocol.messages import (
    AnyEvent,
    Failed,
    Generate,
    GenerationFinished,
    LoadOptions,
    Message,
    ModelLoaded,
    Sampling,
    TextDelta,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from tests.support.cores import ON_ONE_CPU

GREEDY = Sampling(temperature=0.0)


class Answer:
    """All events of one stream and what they add up to."""

    def __init__(self, events: list[AnyEvent]) -> None:
        self.events = events
        self.text = "".join(e.text for e in events if isinstance(e, TextDelta) and e.channel == "answer")
        self.reasoning = "".join(e.text for e in events if isinstance(e, TextDelta) and e.channel == "reasoning")

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def finished(self) -> GenerationFinished:
        last = self.events[-1]
        assert isinstance(last, GenerationFinished), last
        return last

    @property
    def timings(self) -> Timings:
        return self.finished.timings

    @property
    def failed(self) -> Failed:
        last = self.events[-1]
        assert isinstance(last, Failed), last
        return last


def children() -> set[int]:
    """Processes that this one started and that still run."""
    return {p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE}


async def collect(stream: AsyncGenerator[AnyEvent, None]) -> Answer:
    return Answer([event async for event in stream])


def user(*texts: str) -> tuple[Message, ...]:
    """Return a chat whose messages alternate, the first one by the user."""
    return tuple(
        Message(role="user" if index % 2 == 0 else "assistant", content=text) for index, text in enumerate(texts)
    )


def chat(*texts: str, **more: object) -> Generate:
    """Return a greedy request for the next answer of `user(*texts)`."""
    return Generate(**{"messages": user(*texts), "sampling": GREEDY, "max_tokens": 24, **more})  # type: ignore[arg-type]


async def load(backend: Backend, path: Path, **options: object) -> ModelInfo:
    chosen = LoadOptions(**{"n_ctx": 4096, **options})  # type: ignore[arg-type]
    answer = await collect(backend.load(path, chosen, ON_ONE_CPU))
    last = answer.events[-1]
    assert isinstance(last, ModelLoaded), last
    return last.model


class _Closes(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=_Closes)


@contextlib.asynccontextmanager
async def in_use(one: C) -> AsyncIterator[C]:
    """Yield a backend, a conversation or the like, which is closed at the end."""
    try:
        yield one
    finally:
        await one.close()


@contextlib.asynccontextmanager
async def worker(
    path: Path | None = None, *, state_dir: Path | None = None, **options: object
) -> AsyncIterator[LocalBackend]:
    """A real worker process, with `path` loaded when given."""
    async with in_use(LocalBackend(state_dir=state_dir)) as backend:
        if path is not None:
            await load(backend, path, **options)
        yield backend
