"""A backend that plays a script: for the states of the app that a real model cannot be made to hold still in.

Everything about real answers is tested with the real worker elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from cpuchat.backend.base import GenerateRequest
from cpuchat.protocol import (
    AnyEvent,
    Channel,
    EngineInfo,
    GenerationFinished,
    LoadOptions,
    LoadProgress,
    ModelInfo,
    ModelLoaded,
    PrefillProgress,
    TextDelta,
    Timings,
    Unloaded,
)

MODEL = ModelInfo(
    path="/models/qwen2.5-1.5b-instruct-q8_0.gguf",
    name="Qwen2.5-1.5B-Instruct",
    architecture="qwen2",
    quantization="Q8_0",
    n_params=1_543_714_304,
    size=1_646_572_928,
    n_ctx=8192,
    n_ctx_train=32768,
    n_vocab=151_936,
    n_layer=28,
    n_threads=8,
    kv_size=229_376 * 1024,
)


class Gate:
    """A place where the script waits until the test opens it, or the stream is cancelled."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._opened = asyncio.Event()

    def open(self) -> None:
        self._opened.set()

    async def wait(self, cancelled: asyncio.Event) -> None:
        self.reached.set()
        waits = [asyncio.ensure_future(e.wait()) for e in (self._opened, cancelled)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


Step = AnyEvent | Gate


def answer(
    text: str, *, reasoning: str = "", gate: Gate | None = None, stop_reason: str = "end", prompt_n: int = 42
) -> list[Step]:
    """The events of one answer, word by word; `gate` stands before the last word."""
    steps: list[Step] = [PrefillProgress(request_id=1, processed=prompt_n, total=prompt_n, cache_n=0)]
    words: list[tuple[Channel, str]] = []
    words.extend(("reasoning", word) for word in reasoning.split(" ") if word)
    words.extend(("answer", word) for word in text.split(" "))
    for number, (channel, word) in enumerate(words, 1):
        last = number == len(words)
        if last and gate is not None:
            steps.append(gate)
        space = "" if last or words[number][0] != channel else " "
        steps.append(
            TextDelta(request_id=1, text=word + space, channel=channel, predicted_n=number, at_ms=210.0 + 25 * number)
        )
    steps.append(
        GenerationFinished(request_id=1, stop_reason=stop_reason, timings=timings(len(words), prompt_n))  # type: ignore[arg-type]
    )
    return steps


def timings(predicted_n: int, prompt_n: int = 42) -> Timings:
    """40 tok/s, first token after 0.21 s."""
    return Timings(
        prompt_n=prompt_n,
        prompt_ms=prompt_n / 0.262,
        predicted_n=predicted_n,
        predicted_ms=25.0 * max(predicted_n - 1, 0),
        ttft_ms=210.0,
        n_past=prompt_n + predicted_n,
        n_ctx=MODEL.n_ctx,
        seed=7,
    )


class ScriptedBackend:
    """Plays `answers` in order (the last one again and again) and `load_steps` at each load.

    `requests` and `loads` record what was asked. See `backend.base.Backend`.
    """

    def __init__(
        self,
        answers: Sequence[Sequence[Step]] = (),
        load_steps: Sequence[Step] | None = None,
        model: ModelInfo = MODEL,
    ) -> None:
        self.answers = [list(a) for a in answers] or [answer("Hello there.")]
        self.load_steps = (
            [
                LoadProgress(phase="reading", done=model.size // 2, total=model.size),
                LoadProgress(phase="reading", done=model.size, total=model.size),
                ModelLoaded(model=model),
            ]
            if load_steps is None
            else list(load_steps)
        )
        self.requests: list[GenerateRequest] = []
        self.loads: list[tuple[Path, LoadOptions]] = []
        self.closed = False
        self.forgotten: list[str] = []
        self._model: ModelInfo | None = None
        self._cancelled = asyncio.Event()

    @property
    def model(self) -> ModelInfo | None:
        return self._model

    @property
    def engine(self) -> EngineInfo | None:
        return EngineInfo(version="scripted")

    @property
    def pid(self) -> int | None:
        return None

    def die(self) -> None:
        """As if the worker had ended."""
        self._model = None

    async def load(self, path: Path, options: LoadOptions) -> AsyncGenerator[AnyEvent, None]:
        self.loads.append((path, options))
        self._cancelled.clear()
        self._model = None
        async for event in self._play(self.load_steps):
            if isinstance(event, ModelLoaded):
                self._model = event.model
            yield event
        if self._cancelled.is_set():
            yield Unloaded()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[AnyEvent, None]:
        self.requests.append(request)
        self._cancelled.clear()
        steps = self.answers[min(len(self.requests), len(self.answers)) - 1]
        written = 0
        async for event in self._play(steps):
            if isinstance(event, TextDelta):
                written += event.n_tokens
            if isinstance(event, ModelLoaded):
                self._model = event.model
            yield event
        if self._cancelled.is_set():
            yield GenerationFinished(request_id=1, stop_reason="cancelled", timings=timings(written))

    async def _play(self, steps: Sequence[Step]) -> AsyncGenerator[AnyEvent, None]:
        for step in steps:
            if isinstance(step, Gate):
                await step.wait(self._cancelled)
            else:
                await asyncio.sleep(0)
            if self._cancelled.is_set():
                return
            if not isinstance(step, Gate):
                yield step

    async def cancel(self) -> None:
        self._cancelled.set()

    async def forget(self, chat_id: str) -> None:
        self.forgotten.append(chat_id)

    async def close(self) -> None:
        self.closed = True
        self._cancelled.set()
