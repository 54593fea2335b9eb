"""No shown figure contradicts another: real runs of all kinds, recorded by benchmarks/record_runs.py and replayed.

They were made beside other load, on purpose, with the real worker: a toy that stays in L3, models with and without
drafts, with and without a probed bandwidth, stopped while reading and while writing, and a context that was full.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cpuchat.protocol.messages import AnyEvent, GenerationFinished, ModelLoaded, Speculation
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import ChatFigures, DraftingFigures, Meter
from cpuchat.telemetry.roofline import AT_THE_LIMIT, OFF, Roofline

FILES = sorted((Path(__file__).parent / "recorded").glob("*.json"))
CEILINGS = ("ceiling_plain", "ceiling_accepted")


class Recorded(msgspec.Struct):
    name: str
    speculation: Speculation
    events: list[tuple[float, AnyEvent]]


def replayed(file: Path, cached: bool) -> Iterator[tuple[AnyEvent, ChatFigures, ModelInfo | None]]:
    """Return every event with the figures right after it, and 0.3 seconds later if nothing else had come. Not `cached`:
    as on a machine without L3, where the bandwidth, probed under other load, is far too low for what was read."""
    recorded = msgspec.json.decode(file.read_bytes(), type=Recorded)
    meter, model, answering = Meter(), None, False
    meter.asked = recorded.speculation
    for at, event in recorded.events:
        if isinstance(event, ModelLoaded):
            if not cached:
                event = ModelLoaded(model=msgspec.structs.replace(event.model, cache_bytes=0))
            model = event.model
        elif model is not None and not answering:
            answering = True
            meter.request_started(at)
        meter.observe(event, at)
        answering = answering and not isinstance(event, GenerationFinished)
        yield event, meter.figures(at), model
        yield event, meter.figures(at + 0.3), model


def measured(figures: ChatFigures) -> float:
    """Return the average of an answer that is long enough to contradict a ceiling: a fast second is no proof."""
    return figures.decode_tok_s.value or 0.0 if figures.predicted_n > 16 else 0.0


def check_ceilings(figures: ChatFigures, now: Roofline, drafting: DraftingFigures) -> None:
    """Assert that no average on the screen is more than 5 % above one of its ceilings."""
    fastest, plain = measured(figures), (drafting.plain_tok_s.value or 0.0) if figures.ttft_s.value is not None else 0.0
    drafted = drafting.tokens_per_pass.value is not None
    of = {
        "ceiling_plain": plain if drafted else max(fastest, plain),
        "ceiling_accepted": fastest,
    }
    for name in CEILINGS:
        ceiling = getattr(now, name).value
        assert ceiling is None or of[name] <= OFF * ceiling * 1.001, name
    if now.fits_cache:
        assert now.ceiling_plain.value is now.ceiling_accepted.value is now.utilization.value is None
    if now.ceiling_accepted.value is not None:
        assert drafted


def check_limit(figures: ChatFigures, now: Roofline, drafting: DraftingFigures) -> None:
    """Assert that the stated limit agrees with the bar and the ceilings."""
    average = figures.decode_tok_s.value or 0.0
    if now.limit == "memory":
        by = now.ceiling_accepted.value if now.ceiling_accepted.value is not None else now.ceiling_plain.value
        assert by is not None and average >= 0.99 * AT_THE_LIMIT * by
        assert now.utilization.value is None or now.utilization.value >= 0.5
    if now.peak.value is not None and now.utilization.value is not None and now.bandwidth.value is not None:
        assert now.utilization.value == pytest.approx(now.bandwidth.value / now.peak.value.bytes_per_s)
    if figures.phase == "done" and now.utilization.value is not None and now.utilization.value > 1.06:
        assert now.off and not now.limit


def check_drafting(figures: ChatFigures, drafting: DraftingFigures) -> None:
    """Assert that depth, acceptance, tokens per pass and speed-up are there together, and fit each other."""
    nothing = drafting.acceptance.value is None
    assert (drafting.tokens_per_pass.value is None) == nothing
    assert not nothing or drafting.speed_up.value is None
    if drafting.acceptance.value is None or drafting.tokens_per_pass.value is None:
        return
    drafted = sum(n for n, _ in drafting.counts.by_position)
    accepted = sum(n for _, n in drafting.counts.by_position)
    assert drafting.acceptance.value == pytest.approx(accepted / drafted)
    assert sum(one.draft_n for one in drafting.counts.by_drafter) == drafted
    assert sum(one.draft_n_accepted for one in drafting.counts.by_drafter) == accepted
    assert 0 <= drafting.acceptance.value <= 1
    assert 1 <= drafting.tokens_per_pass.value <= 1 + len(drafting.counts.by_position)
    if drafting.off is None:
        assert drafting.depth is not None and drafting.depth >= 1
    if drafting.speed_up.value is not None:
        assert drafting.plain_tok_s.value is not None
        assert drafting.speed_up.value * drafting.plain_tok_s.value == pytest.approx(figures.decode_tok_s.value)


def check_counts(event: AnyEvent, figures: ChatFigures, model: ModelInfo | None) -> None:
    """Assert that the context is never fuller than it is long, and the same after the last event as before."""
    if figures.n_ctx.value is not None and figures.n_past.value is not None:
        assert 0 <= figures.n_past.value <= figures.n_ctx.value
        used, _, size = units.context(figures.n_past.value, figures.n_ctx.value).partition("/")
        assert as_number(used) <= as_number(size)
    assert (
        figures.prefill_cached.value <= figures.prefill_processed <= figures.prefill_total or not figures.prefill_total
    )
    if isinstance(event, GenerationFinished):
        assert figures.phase == "done" and figures.live_tok_s.value is None
        assert figures.n_past.value == event.timings.n_past and figures.n_ctx.value == event.timings.n_ctx
        assert figures.predicted_n == event.timings.predicted_n
        # What was read or written stays in the context; the last token is not evaluated any more.
        assert figures.n_past.value >= figures.prefill_processed + max(0, figures.predicted_n - 1) - 1
        drafting, timings = figures.drafting, event.timings
        assert drafting.tokens_per_pass.value == timings.tokens_per_pass and drafting.speed_up.value == timings.speed_up


def as_number(words: str) -> float:
    return float(words[:-1]) * 1000 if words.endswith("k") else float(words) * 1000 / 1024


def test_there_are_runs_of_all_kinds() -> None:
    assert len(FILES) >= 9
    events = [event for file in FILES for _, event in msgspec.json.decode(file.read_bytes(), type=Recorded).events]
    models = [event.model for event in events if isinstance(event, ModelLoaded)]
    assert all(model.work is not None for model in models)  # without it there is no ceiling: record them anew
    assert {model.peak_read > 0 for model in models} == {True, False}


@pytest.mark.parametrize("cached", [True, False], ids=["L3", "memory"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_figure_contradicts_another(file: Path, cached: bool) -> None:
    finished = 0
    for event, figures, model in replayed(file, cached):
        finished += isinstance(event, GenerationFinished)
        now, drafting = figures.roofline, figures.drafting
        check_ceilings(figures, now, drafting)
        check_limit(figures, now, drafting)
        check_drafting(figures, drafting)
        check_counts(event, figures, model)
    assert finished
