"""Tests speculation through the real worker process: what it reports, and what it leaves as it was."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import (
    Generate,
    LoadOptions,
    LoadProgress,
    ModelLoaded,
    Speculation,
    SpeculationUpdate,
    TextDelta,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import SpeculationFigures
from tests.support.chatting import GREEDY, Answer, collect, worker
from tests.support.pairs import pair_files

pytestmark = pytest.mark.asyncio(loop_scope="module")
ALL = ("draft", "suffix")
PLAIN = Speculation()
DRAFT = Speculation(drafters=("draft",), depth=4)
ONE_THREAD = PlacementSpec(threads=1, draft_cores="shared")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return pair_files(tmp_path_factory.mktemp("pair"), 0.5)


async def load(
    backend: LocalBackend, path: Path, draft: Path | None = None, **more: object
) -> tuple[ModelInfo, Answer]:
    options = {"n_ctx": 1024, "draft_path": str(draft or ""), **more}
    answer = await collect(backend.load(path, LoadOptions(**options), ONE_THREAD))  # type: ignore[arg-type]
    last = answer.events[-1]
    assert isinstance(last, ModelLoaded), last
    return last.model, answer


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
    assert figures.recent_draft_n <= figures.draft_n and figures.recent_draft_n_accepted <= figures.draft_n_accepted
    assert figures.draft_n_accepted <= figures.draft_n and figures.passes >= (positions[0][0] if positions else 0)
    assert (figures.drafter in {d.name for d in drafters}) if drafters else figures.drafter == ""


async def test_figures_of_an_answer(files: tuple[Path, Path], other: LocalBackend) -> None:
    info, _ = await load(other, *files)
    assert info.draft and info.notes == ()
    answer = await collect(other.generate(say("a b c", DRAFT, max_tokens=200)))
    timings, figures = answer.timings, answer.timings.speculation
    assert figures is not None
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
    await load(other, *files)
    plain = await collect(other.generate(say("a b c", max_tokens=120)))
    assert plain.timings.speculation is None and plain.timings.draft_n == 0
    assert {d.drafter for d in plain.of(TextDelta)} == {""} and not plain.of(SpeculationUpdate)
    for stop in ((), ("no such text",)):  # text goes out through a thread of its own, or not
        answer = await collect(other.generate(say("a b c", DRAFT, max_tokens=120, stop=stop)))
        deltas, figures = answer.of(TextDelta), answer.timings.speculation
        assert figures is not None
        assert "".join(d.text for d in deltas) == answer.text == plain.text
        assert sum(d.n_tokens for d in deltas) == deltas[-1].predicted_n == 120
        counts = [d.predicted_n for d in deltas]
        assert counts == sorted(counts) and all(d.n_tokens >= 0 for d in deltas)
        assert sum(d.n_tokens for d in deltas if d.drafter == "draft") == figures.draft_n_accepted
        assert {d.drafter for d in deltas} == {"", "draft"}


async def test_switched_for_each_request(files: tuple[Path, Path], other: LocalBackend) -> None:
    """No reload, and the KV cache goes on being used whoever drafts."""
    await load(other, *files)
    pid, text, held = other.pid, "a b c d e f g h", 0
    for drafters in ((), ("draft",), ("suffix",), (), ALL, ()):
        answer = await collect(other.generate(say(text, Speculation(drafters=drafters, depth=3), max_tokens=16)))
        assert not answer.of(LoadProgress) and answer.finished.stop_reason == "max_tokens"
        figures = answer.timings.speculation
        assert (figures is not None) is bool(drafters)
        if figures is not None:
            assert_consistent(figures)
            assert {d.name for d in figures.by_drafter} <= set(drafters)
        assert answer.timings.cache_n == held
        held = answer.timings.n_past
        text += answer.text
    assert other.pid == pid


async def test_drafters_without_a_draft_model(files: tuple[Path, Path], other: LocalBackend) -> None:
    info, _ = await load(other, files[0])
    assert info.draft == "" and info.notes == ()
    text = " the one and the two" * 6
    plain = await collect(other.generate(say(text)))
    answer = await collect(other.generate(say(text, Speculation(drafters=ALL, depth=4))))
    assert answer.text == plain.text and answer.timings.speculation is not None
    assert_consistent(answer.timings.speculation)
    alone = await collect(other.generate(say(text, DRAFT)))
    assert alone.text == plain.text and alone.timings.speculation is None  # there is nothing to draft with


async def test_calibration_is_shown_and_kept(files: tuple[Path, Path]) -> None:
    async with worker() as backend:
        first, answer = await load(backend, *files, calibrate=True)
        measured = [e for e in answer.of(LoadProgress) if e.phase == "calibrating"]
        assert measured[-1].done == measured[-1].total > 1
        assert [e.done for e in measured] == sorted(e.done for e in measured)
    # A busy machine may disturb the measurement: it is not kept then, or counts only until the cores are idle.
    quiet, kept = bool(first.pass_ms), paths.calibration_file().exists()
    assert len(first.pass_ms) == (32 if quiet else 0)
    assert kept or not quiet
    async with worker() as backend:  # another process
        again, answer = await load(backend, *files, calibrate=True)
        measured_again = any(e.phase == "calibrating" for e in answer.of(LoadProgress))
        assert measured_again != kept or not quiet
        assert not quiet or again.pass_ms == first.pass_ms
        plain = await collect(backend.generate(say("a b c")))
        adaptive = await collect(backend.generate(say("a b c", Speculation(drafters=ALL))))
        assert adaptive.text == plain.text
        figures = adaptive.timings.speculation
        assert figures is not None and (figures.plain_ms or figures.disturbed or not again.pass_ms)
        if figures.plain_ms:
            assert (adaptive.timings.speed_up is not None) == (adaptive.timings.draft_n > 0)


async def test_cancel_while_it_drafts(files: tuple[Path, Path], other: LocalBackend) -> None:
    await load(other, *files)
    events = []
    async for event in other.generate(say("a b c", DRAFT, max_tokens=0)):
        events.append(event)
        if isinstance(event, TextDelta):
            await other.cancel()
    answer = Answer(events)
    assert answer.finished.stop_reason in ("cancelled", "context")
    assert sum(d.n_tokens for d in answer.of(TextDelta)) == answer.timings.predicted_n
    whole = await collect(other.generate(say("a b c", max_tokens=0)))
    assert whole.text.startswith(answer.text)
