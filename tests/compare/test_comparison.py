"""Tests comparisons with real workers and the demo pair."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from cpuchat.compare.comparison import Comparison
from cpuchat.compare.runner import Side
from cpuchat.config.settings import Settings
from cpuchat.models.library.library import Library
from cpuchat.protocol.messages import AnyEvent, Generate, GenerationFinished, LoadProgress, TextDelta
from cpuchat.protocol.timings import MAX_CPU_WAIT, MIN_TOKENS
from tests.support.cores import ON_ONE_CPU

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("measured_machine")]

PROMPT = "Why does a CPU write slower than it reads the prompt?"


def demo(name: str = "demo", **changes: str) -> Side:
    return Side.of(Library([]).resolve(name), {key.replace("_", "-"): value for key, value in changes.items()})


class Watched:
    """A comparison and every event of its sides, in order."""

    def __init__(self, a: Side, b: Side, max_tokens: int = 16) -> None:
        settings = Settings()
        settings.chat.max_tokens = max_tokens
        self.events: list[tuple[int, AnyEvent]] = []
        self.comparison = Comparison((a, b), settings)
        self.load_on(ON_ONE_CPU.cores)
        self.comparison.tell = lambda side, event: self.events.append((side, event))

    def load_on(self, cores: str) -> None:
        for runner in self.comparison.runners:
            runner.settings.engine.cores = cores

    def order(self, kind: type) -> list[int]:
        """Return the sides of these events, consecutive ones once."""
        sides = [side for side, event in self.events if isinstance(event, kind)]
        return [side for n, side in enumerate(sides) if n == 0 or sides[n - 1] != side]


@pytest.fixture
async def watched(request: pytest.FixtureRequest) -> AsyncIterator[Watched]:
    found = Watched(*getattr(request, "param", (demo(), demo("demo-q4"))))
    yield found
    await found.comparison.close()


async def test_one_answers_after_the_other_a_repeat_swaps_them_and_a_stop_keeps_what_is_written(
    watched: Watched,
) -> None:
    comparison = watched.comparison
    first = await comparison.ask(PROMPT)
    assert watched.order(TextDelta) == [0, 1]
    a, b = first.answers
    assert first.complete
    assert a.content and b.content and a.model is not None and b.model is not None
    assert (a.model.quantization, b.model.quantization) == ("Q8_0", "Q4_K_M")
    assert a.written.text == a.content and a.timings is not None
    assert a.written.n_tokens == a.timings.predicted_n

    watched.events.clear()
    second = await comparison.repeat()
    assert watched.order(TextDelta) == [1, 0]
    assert watched.order(LoadProgress) == []
    assert second.answers[0].content == a.content  # greedy
    assert second.answers[0].timings is not None
    assert second.answers[0].timings.prompt_n == a.timings.prompt_n  # nothing is reused

    third = await comparison.ask("How do I stop an answer?")
    assert third.answers[1].timings is not None
    assert third.answers[1].timings.prompt_n > a.timings.prompt_n  # it continues
    assert [len(turn.rounds) for turn in comparison.turns] == [2, 1]

    def stop_late(side: int, event: AnyEvent) -> None:
        comparison.stopped |= side == 1 and isinstance(event, GenerationFinished)

    comparison.tell = stop_late
    late = await comparison.ask(PROMPT)
    assert late.complete and comparison.turns[-1].rounds == [late]  # both had ended

    stops: list[object] = []

    def stop(side: int, event: AnyEvent) -> None:
        if isinstance(event, TextDelta) and not stops:
            stops.append(asyncio.ensure_future(comparison.stop()))

    comparison.tell = stop
    stopped = await comparison.ask(PROMPT)
    assert comparison.stopped and not stopped.complete
    assert stopped.answers[0].content and not stopped.answers[1].content
    assert stopped.stopped and stopped.answers[1].stop_reason == "cancelled"  # the other may end before it is stopped

    # Their undisturbed answers tell of the models as those of chats do.
    measured = {model.alias: model.measured_tok_s for model in Library([]).local_models()}
    for side, name in enumerate(("demo", "demo-q4")):
        rates = [0.0] + [
            timings.predicted_per_second or 0.0 for one in (first, second, third, late, stopped)
            if (timings := one.answers[side].timings) and timings.predicted_n >= MIN_TOKENS
            and (timings.cpu_wait or 0.0) <= MAX_CPU_WAIT
        ]  # fmt: skip
        assert measured[name] == rates[-1]


async def test_a_side_that_is_killed_or_does_not_load_keeps_the_other(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = watched.comparison
    comparison.tell = lambda side, event: side == 0 and isinstance(event, TextDelta) and _kill(comparison, 0)
    backend = comparison.runners[0].conversation.backend
    generate = backend.generate

    def long(request: Generate) -> AsyncIterator[AnyEvent]:
        return generate(replace(request, ignore_eos=True, max_tokens=100 * request.max_tokens))

    with monkeypatch.context() as longer:  # else it may have ended when its first text is seen
        longer.setattr(backend, "generate", long)
        found = await comparison.ask(PROMPT)
    a, b = found.answers
    assert a.failed is not None and a.failed.code == "worker_died"
    assert a.content  # what it wrote stays
    assert b.failed is None and b.timings is not None and b.content
    assert not found.complete

    comparison.tell = lambda side, event: None
    repeated = await comparison.repeat()  # its worker is started again
    assert repeated.complete and all((answer.memory or 0) > 10_000_000 for answer in repeated.answers)


def _kill(comparison: Comparison, side: int) -> None:
    pid = comparison.runners[side].conversation.backend.pid
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


async def test_what_does_not_fit_together_is_loaded_in_turn(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuchat.compare.comparison.fit_together", lambda *_: (512, "Loaded in turn."))
    comparison = watched.comparison
    running: list[int] = []

    def count(side: int, event: AnyEvent) -> None:
        if isinstance(event, GenerationFinished):
            running.append(sum(runner.conversation.backend.pid is not None for runner in comparison.runners))

    comparison.tell = count
    assert (await comparison.ask(PROMPT)).complete and running == [1, 1]
    assert comparison.in_turn
    assert (await comparison.repeat()).complete
