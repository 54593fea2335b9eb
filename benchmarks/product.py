"""Our side of the comparisons: the worker process that the app and `cpuchat ask` use, through the same backend."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

from common import MeasureError

from cpuchat.backend.base import DEFAULT_PLACEMENT, Backend
from cpuchat.backend.local import LocalBackend
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.protocol.messages import (
    Failed,
    Generate,
    GenerationFinished,
    LoadOptions,
    ModelLoaded,
    Sampling,
    Speculation,
    StateKey,
    TextDelta,
)
from cpuchat.protocol.timings import Timings

GREEDY = Sampling(temperature=0.0, seed=1)
PLAIN = Speculation()


def default_threads() -> int:
    """How many threads a worker computes with when nobody says."""
    return len(place(read_topology(), PlacementSpec()).cpus)


@dataclass(frozen=True)
class Answer:
    """One answer, with the worker's figures."""

    timings: Timings
    text: str
    stop_reason: str

    @property
    def rate(self) -> float:
        """Decode tok/s as the app shows it."""
        return self.timings.predicted_per_second or 0.0


@contextlib.asynccontextmanager
async def worker(
    model: Path,
    options: LoadOptions,
    spec: PlacementSpec = DEFAULT_PLACEMENT,
    state_dir: Path | None = None,
) -> AsyncGenerator[LocalBackend, None]:
    """A worker process with the model loaded, which keeps states in `state_dir`; ended at the end.

    Raises:
        MeasureError: it did not load.
    """
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as logs:
        backend = LocalBackend(log_dir=Path(logs), state_dir=state_dir)
        try:
            async for event in backend.load(model, options, spec):
                if isinstance(event, Failed):
                    raise MeasureError(f"{event.message} {event.hint}")
            if backend.model is None:
                raise MeasureError(f"{model.name} did not load")
            yield backend
        finally:
            await backend.close()


async def answer(
    backend: Backend,
    prompt: str,
    max_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    to_the_end: bool = True,
    speculation: Speculation = PLAIN,
    chat: str = "",
) -> Answer:
    """Continue `prompt` as it is (no template), in `chat` if it has a name, and return the figures.

    Raises:
        MeasureError: the worker failed, or (`to_the_end`) the model ended before `max_tokens`.
    """
    state = StateKey(chat=chat)
    request = Generate(prompt=prompt, sampling=sampling, max_tokens=max_tokens, speculation=speculation, state=state)
    done = await ask(backend, request)
    if to_the_end and done.timings.predicted_n < max_tokens:
        raise MeasureError(f"ended after {done.timings.predicted_n} tokens ({done.stop_reason})")
    return done


async def ask(backend: Backend, request: Generate) -> Answer:
    """One request and its figures.

    Raises:
        MeasureError: the worker failed.
    """
    text: list[str] = []
    finished: GenerationFinished | None = None
    async for event in backend.generate(request):
        if isinstance(event, TextDelta):
            text.append(event.text)
        elif isinstance(event, Failed):
            raise MeasureError(f"{event.message} {event.hint}")
        elif isinstance(event, GenerationFinished):
            finished = event
        elif isinstance(event, ModelLoaded):
            raise MeasureError("the worker was started again in the middle of a measurement")
    if finished is None:
        raise MeasureError("the answer has no end")
    return Answer(finished.timings, "".join(text), finished.stop_reason)
