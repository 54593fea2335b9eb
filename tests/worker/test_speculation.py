"""Tests speculation through the real worker process: what it reports, and what it leaves as it was."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.protocol.messages import Generate, Speculation, SpeculationUpdate, TextDelta
from cpuchat.protocol.timings import SpeculationFigures
from tests.support.chatting import GREEDY, collect, load
from tests.support.pairs import pair_files

pytestmark = pytest.mark.asyncio(loop_scope="module")
ALL = ("draft", "suffix")
PLAIN = Speculation()
DRAFT = Speculation(drafters=("draft",), depth=4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return pair_files(tmp_path_factory.mktemp("pair"), 0.5)


def say(prompt: str, speculation: Speculation = PLAIN, **more: object) -> Generate:
    fields = {"prompt": prompt, "sampling": GREEDY, "max_tokens": 60, "speculation": speculation, **more}
    return Generate(**fields)  # type: ignore[arg-type]


def assert_consistent(figures: SpeculationFigures) -> None:
    positions, drafters = figures.by_position, figures.by_drafter
    assert sum(n for n, _ in positions) == sum(d.draft_n for d in drafters) == figures.draft_n
    assert sum(n for _, n in positions) == sum(d.draft_n_accepted for d in drafters) == figures.draft_n_accepted
    assert all(accepted <= drafted for drafted, accepted in positions)
    for one, after in pairwise(positions):  # nothing is drafted or right after what is not
        assert after[0] <= one[0] and after[1] <= one[1]
    assert figures.draft_n_accepted <= figures.draft_n and figures.passes >= (positions[0][0] if positions else 0)
    assert (figures.drafter in {d.name for d in drafters}) if drafters else figures.drafter == ""


async def test_figures_of_an_answer(files: tuple[Path, Path], other: LocalBackend) -> None:
    info = await load(other, files[0], n_ctx=1024, draft_path=str(files[1]))
    assert info.draft and info.notes == ()
    answer = await collect(other.generate(say("a b c", DRAFT, max_tokens=200)))
    timings, figures = answer.timings, answer.timings.speculation
    assert_consistent(figures)
    assert (timings.draft_n, timings.draft_n_accepted) == (figures.draft_n, figures.draft_n_accepted)
    assert timings.predicted_n == 200 == figures.passes + figures.draft_n_accepted + 1
    assert timings.tokens_per_pass == 199 / figures.passes > 1
    assert timings.cpu_wait is not None and timings.cpu_wait >= 0
    assert figures.draft_ms > 0 and [d.name for d in figures.by_drafter] == ["draft"]
    assert timings.n_past == timings.prompt_n + 199
    # What is told meanwhile only grows, and ends at most at what is told at the end.
    updates = answer.of(SpeculationUpdate)
    assert updates
    for one, after in zip(updates, [*updates[1:], None], strict=True):
        assert_consistent(one.figures)
        assert one.predicted_n == one.figures.passes + one.figures.draft_n_accepted + 1
        later = after.figures if after else figures
        assert one.figures.passes <= later.passes and one.figures.draft_n <= later.draft_n


async def test_spans_of_drafters_are_the_text(files: tuple[Path, Path], other: LocalBackend) -> None:
    await load(other, files[0], n_ctx=1024, draft_path=str(files[1]))
    plain = await collect(other.generate(say("a b c", max_tokens=120)))
    assert plain.timings.speculation is None and plain.timings.draft_n == 0
    assert {d.drafter for d in plain.of(TextDelta)} == {""} and not plain.of(SpeculationUpdate)
    for stop in ((), ("no such text",)):  # text goes out through a thread of its own, or not
        answer = await collect(other.generate(say("a b c", DRAFT, max_tokens=120, stop=stop)))
        deltas, figures = answer.of(TextDelta), answer.timings.speculation
        assert "".join(d.text for d in deltas) == answer.text == plain.text
        assert sum(d.n_tokens for d in deltas) == deltas[-1].predicted_n == 120
        counts = [d.predicted_n for d in deltas]
        assert counts == sorted(counts) and all(d.n_tokens >= 0 for d in deltas)
        assert sum(d.n_tokens for d in deltas if d.drafter == "draft") == figures.draft_n_accepted
        assert {d.drafter for d in deltas} == {"", "draft"}
