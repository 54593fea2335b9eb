"""Tests agreement with real workers: against `cpuchat quality` on the same tokens, stopped, and where it cannot be."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import UsageError
from cpuchat.base.line_process import LineOutput
from cpuchat.compare.runner import Side, SideAnswer
from cpuchat.engine.lockstep import Lockstep, Window
from cpuchat.present import compare as words
from cpuchat.quality.measure import scores_of
from cpuchat.quality.messages import Answer, QualityStart, Scored
from cpuchat.quality.statistics import Summary, summarize
from tests.compare.test_comparison import Watched, demo
from tests.support.chatting import in_use
from tests.support.cores import ONE_CPU

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("measured_machine")]
PROMPT = "List ten facts."  # the demo's two files begin their answers to this with different words


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    found = Watched(demo(), demo("demo-q4"), max_tokens=40)
    yield found
    await found.comparison.close()


class _After(Window):
    """A window of which the tokens of an answer are scored."""

    n_prompt = 0

    @property
    def first(self) -> int:
        return self.n_prompt - 1


def as_quality_measures(base: Side, other: Side, answer: SideAnswer) -> Summary:
    """What the process of `cpuchat quality` finds on the tokens of an answer."""
    stream = io.BytesIO()
    start = QualityStart(base=base.path, others=(other.path,), cpus=ONE_CPU, texts=(), n_ctx=512)
    window = _After("answer", [*answer.prompt_tokens, *answer.tokens])
    _After.n_prompt = len(answer.prompt_tokens)
    with contextlib.closing(Lockstep(start, LineOutput(stream))) as lockstep:
        lockstep._base = lockstep._load(base.path)
        lockstep._others.append(lockstep._load(other.path))
        lockstep._compare(lockstep._base, [(0, lockstep._others[0])], 0, window)
    lines = [msgspec.json.decode(line, type=Answer) for line in stream.getvalue().splitlines()]
    (scored,) = (line for line in lines if isinstance(line, Scored))
    return summarize([scores_of(scored)])


async def test_the_figures_are_those_of_quality_on_the_same_tokens(watched: Watched) -> None:
    comparison = watched.comparison
    done = await comparison.ask(PROMPT)
    assert all(len(one.tokens) == one.written.n_tokens for one in done.answers)
    found = await comparison.agree()
    assert found is not None and done.agreement is found
    for writer, answer in enumerate(done.answers):
        sides = comparison.sides[writer], comparison.sides[1 - writer]
        expected, own = as_quality_measures(*sides, answer), found.answers[writer]
        assert expected.n == len(own.tokens)
        assert own.same_top == pytest.approx(expected.same_top.value, abs=1e-9)
        assert own.kld == pytest.approx(expected.kld.value, abs=5e-5)
        assert own.ppl == pytest.approx(expected.ppl_base, abs=5e-4)
        assert own.ppl_other == pytest.approx(expected.ppl_other, abs=5e-4)
        assert "".join(done.answers[writer].written.text[t.start : t.end] for t in own.tokens) == answer.content
    assert any("would have written" in one for one in words.sentences(comparison, comparison.turns[-1])[1])
    tokens = words.as_json(comparison)["turns"][0]["rounds"][0]["agreement"]["answers"][1]["tokens"]
    assert [(one["rank"], one["step"]) for one in tokens] == [(one.rank, one.step) for one in found.answers[1].tokens]


async def test_a_stop_drops_the_agreement_and_the_next_prompt_continues(watched: Watched) -> None:
    comparison = watched.comparison
    with pytest.raises(UsageError):
        await comparison.agree()  # nothing was asked
    done = await comparison.ask(PROMPT)
    stopping = []

    def stop(share: float) -> None:
        comparison.stopped = True
        stopping.append(share)

    assert await comparison.agree(stop) is None
    assert done.agreement is None and done.complete and not comparison.busy
    assert len(stopping) == 1
    assert await comparison.agree() is not None
    second = await comparison.ask("And then?")
    assert second.complete and second.agreement is None
    comparison.in_turn = "Not enough memory for both."
    with pytest.raises(UsageError, match="in memory"):
        await comparison.agree()


async def test_other_vocabularies_have_no_agreement(tiny_model: Path) -> None:
    watched = Watched(demo(), Side.of(tiny_model), max_tokens=8)
    async with in_use(watched.comparison) as comparison:
        done = await comparison.ask("Hello")
        with pytest.raises(UsageError, match="Only the texts are compared"):
            await comparison.agree()
        assert done.agreement_note in words.sentences(comparison, comparison.turns[-1])[1]
