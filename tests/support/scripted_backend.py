"""A backend that plays a script: for the states of the app that a real model cannot be made to hold still in.

Everything about real answers is tested with the real worker elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from cpuchat.backend.base import DEFAULT_PLACEMENT
from cpuchat.config.servers import Source
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import (
    AnyEvent,
    Channel,
    Failed,
    Generate,
    GenerationFinished,
    LoadCancelled,
    LoadOptions,
    LoadProgress,
    Measure,
    Measured,
    ModelLoaded,
    PrefillProgress,
    SpeculationUpdate,
    TextDelta,
    ToolCall,
)
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.protocol.timings import DrafterCount, SpeculationFigures, Timings
from tests.support.costs import work_of_size

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
    peak_read=78e9,
    cache_bytes=32 << 20,
    work=work_of_size(1_646_572_928, 28_672),
)

WITH_DRAFT = msgspec.structs.replace(
    MODEL,
    draft="Qwen2.5-0.5B-Instruct",
    draft_quantization="Q8_0",
    draft_work=work_of_size(531_000_000, 12_288),
    pass_ms=tuple(39.7 + 6.0 * n for n in range(32)),
)
"""The same with a draft model beside it."""

DRAFTING = SpeculationFigures(
    passes=66,
    draft_n=470,
    draft_n_accepted=346,
    by_position=((66, 64), (66, 60), (66, 55), (66, 52), (66, 46), (66, 40), (66, 29)),
    by_drafter=(
        DrafterCount(name="draft", draft_n=400, draft_n_accepted=290),
        DrafterCount(name="suffix", draft_n=70, draft_n_accepted=56),
    ),
    drafter="draft",
    depth=7,
    draft_passes=470,
    draft_ms=700.0,
    plain_ms=39.7,
)
"""66 passes with seven tokens drafted in each."""

REFUSED = msgspec.structs.replace(
    DRAFTING,
    draft_n_accepted=160,
    depth=0,
    off=DraftsOff("low acceptance", acceptance=0.31, slower_share=0.12),
)
"""Drafting that does not pay."""


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
    text: str,
    *,
    reasoning: str = "",
    gate: Gate | None = None,
    stop_reason: str = "end",
    prompt_n: int = 42,
    drafters: Sequence[str] = ("",),
    speculation: SpeculationFigures | None = None,
) -> list[Step]:
    """Return the events of one answer, word by word; `gate` is before the last word. `drafters` take turns in proposing
    the words; `speculation` is sent before the gate and at the end."""
    steps: list[Step] = [PrefillProgress(request_id=1, processed=prompt_n, total=prompt_n, cache_n=0)]
    words: list[tuple[Channel, str]] = []
    words.extend(("reasoning", word) for word in reasoning.split(" ") if word)
    words.extend(("answer", word) for word in text.split(" "))
    for number, (channel, word) in enumerate(words, 1):
        last = number == len(words)
        if last and speculation is not None:
            steps.append(SpeculationUpdate(request_id=1, predicted_n=412, figures=speculation))
        if last and gate is not None:
            steps.append(gate)
        space = "" if last or words[number][0] != channel else " "
        steps.append(
            TextDelta(
                request_id=1,
                text=word + space,
                channel=channel,
                predicted_n=number,
                at_ms=210.0 + 25 * number,
                drafter=drafters[number % len(drafters)],
            )
        )
    figures = timings(len(words), prompt_n)
    if speculation is not None:
        figures = msgspec.structs.replace(
            figures,
            draft_n=speculation.draft_n,
            draft_n_accepted=speculation.draft_n_accepted,
            predicted_n=412,
            predicted_ms=9952.0,
            speculation=speculation,
        )
    steps.append(GenerationFinished(request_id=1, stop_reason=stop_reason, timings=figures))  # type: ignore[arg-type]
    return steps


def calling(said: str, *calls: ToolCall) -> list[Step]:
    """Return the events of an answer that ends with calls."""
    *before, finished = answer(said)
    assert isinstance(finished, GenerationFinished)
    return [*before, msgspec.structs.replace(finished, calls=calls)]


def timings(predicted_n: int, prompt_n: int = 42) -> Timings:
    """Return 40 tok/s and a first token after 0.21 s."""
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
    """Plays `answers` in order (the last one again and again) and `load_steps` at each load, as a `Backend`. `requests`
    and `loads` record what was asked. `draft_failure` ends each load with a draft model."""

    def __init__(
        self,
        answers: Sequence[Sequence[Step]] = (),
        load_steps: Sequence[Step] | None = None,
        model: ModelInfo = MODEL,
        draft_failure: Failed | None = None,
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
        self.requests: list[Generate] = []
        self.loads: list[tuple[Source, LoadOptions]] = []
        self.specs: list[PlacementSpec] = []
        self.draft_failure = draft_failure
        self.closed = False
        self.forgotten: list[str] = []
        self.reasoning_ended = False
        self.calibrating: Gate | None = None  # until which calibrations wait
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
        """Act as if the worker had ended."""
        self._model = None

    def load(
        self, path: Source, options: LoadOptions, spec: PlacementSpec = DEFAULT_PLACEMENT
    ) -> AsyncGenerator[AnyEvent, None]:
        self._cancelled.clear()
        self.specs.append(spec)
        return self._load(path, options)

    async def _load(self, path: Source, options: LoadOptions) -> AsyncGenerator[AnyEvent, None]:
        self.loads.append((path, options))
        self._model = None
        failure = self.draft_failure if options.draft_path else None
        async for event in self._play([failure] if failure else self.load_steps):
            if isinstance(event, ModelLoaded):
                self._model = event.model
            yield event
        if self._cancelled.is_set():
            yield LoadCancelled()

    async def measure(self, request: Measure) -> Measured | Failed:
        if self.calibrating is not None:
            await self.calibrating.wait(self._cancelled)
        return Measured(request_id=request.request_id, seconds=0.0)

    def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        self._cancelled.clear()
        return self._generate(request)

    async def _generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        self.requests.append(request)
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

    async def end_reasoning(self) -> bool:
        self.reasoning_ended = True
        return True

    async def count_tokens(self, of: str | Generate) -> int | None:
        return None

    async def forget(self, chat_id: str) -> None:
        self.forgotten.append(chat_id)

    async def unload(self) -> None:
        self._model = None

    def kill(self) -> None:
        self._cancelled.set()

    async def close(self) -> None:
        self.closed = True
        self._cancelled.set()
