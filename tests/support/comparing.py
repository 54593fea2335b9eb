"""The app with a comparison of two scripted sides."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from cpuchat.compare.runner import Side
from cpuchat.protocol.messages import TextDelta
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.tui.compare.screen import CompareScreen
from tests.support.chat_app import RunningApp, running
from tests.support.costs import work_of_size
from tests.support.scripted_backend import MODEL, ScriptedBackend, Step, answer

SIDES = (
    Side(path="/models/q8.gguf", model="Qwen2.5-1.5B-Instruct", quantization="Q8_0"),
    Side(path="/models/q4.gguf", model="Qwen2.5-1.5B-Instruct", quantization="Q4_K_M"),
)
PROMPT = "Why does a CPU write slower than it reads the prompt?"
TEXTS = (
    "Reading the prompt is a **matrix × matrix** product: each weight is fetched once and used for every token. "
    "Writing is matrix × vector: every weight is fetched again for each token, so memory bandwidth sets the pace.",
    "Reading the prompt is a **matrix × matrix** product: each weight is fetched once and used for all tokens. "
    "Writing is matrix × vector: every weight is read again for each new token, so bandwidth is the limit.",
)
Q8: ModelInfo = msgspec.structs.replace(MODEL, path=SIDES[0].path)
Q4: ModelInfo = msgspec.structs.replace(
    MODEL, path=SIDES[1].path, quantization="Q4_K_M", work=work_of_size(986_000_000)
)


def faster(steps: list[Step], factor: float) -> list[Step]:
    """The same answer, so many times as fast."""
    last: Any = steps[-1]
    timings = msgspec.structs.replace(last.timings, predicted_ms=last.timings.predicted_ms / factor, ttft_ms=180.0)
    sooner = [
        msgspec.structs.replace(step, at_ms=step.at_ms / factor) if isinstance(step, TextDelta) else step
        for step in steps[:-1]
    ]
    return [*sooner, msgspec.structs.replace(last, timings=timings)]


def scripted() -> list[ScriptedBackend]:
    """Two sides with their answers; B is 1.49 times as fast."""
    return [scripted_side(answer(TEXTS[0]), model=Q8), scripted_side(faster(answer(TEXTS[1]), 1.49), model=Q4)]


def scripted_side(*answers: Sequence[Step], **options: Any) -> ScriptedBackend:
    """A side with these answers, after that to the warm-up."""
    return ScriptedBackend([answer("Hi"), *answers], **options)


class ComparingApp(RunningApp):
    """A running app with a comparison on its screen."""

    sides: Sequence[ScriptedBackend]

    @property
    def screen(self) -> CompareScreen:
        found = self.app.screen_stack[1]
        assert isinstance(found, CompareScreen)
        return found

    async def done(self) -> None:
        """Wait until the round has ended, is shown and is saved."""
        rounds = self.screen.comparison.turns
        await self.until(lambda: rounds is self.screen.comparison.turns and bool(rounds) and not self.screen.busy)
        await self.until(lambda: not [w for w in self.app.workers if w.group == "round" and w.is_running])


@contextlib.asynccontextmanager
async def comparing(sides: Sequence[ScriptedBackend] | None = None, **options: Any) -> AsyncIterator[ComparingApp]:
    """Open the comparison of `SIDES` over a loaded chat."""
    sides = sides or scripted()
    async with running(**options) as app:
        await app.ready()
        waiting = list(sides)
        app.app.services.new_backend = lambda: waiting.pop(0) if waiting else ScriptedBackend()
        found = ComparingApp.__new__(ComparingApp)
        vars(found).update(vars(app))
        found.sides = sides
        app.chat.commands.compare_sides(SIDES, PROMPT)
        await app.until(lambda: isinstance(app.app.screen, CompareScreen))
        yield found
