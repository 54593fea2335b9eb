"""Tests figures of answers."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.protocol.timings import DrafterCount, SpeculationFigures, Timings


def test_an_answer_keeps_its_figures_when_its_drafter_is_gone() -> None:
    drafted = SpeculationFigures(by_drafter=(DrafterCount(name="lookup", draft_n=8, draft_n_accepted=6),))
    kept = Timings(predicted_n=11, speculation=drafted)
    assert msgspec.json.decode(msgspec.json.encode(kept), type=Timings) == kept


def test_figures_of_an_answer_in_parts_are_those_of_all() -> None:
    drafted = SpeculationFigures(
        passes=4, draft_n=8, draft_n_accepted=6, by_position=((4, 3), (4, 3)),
        by_drafter=(DrafterCount(name="suffix", draft_n=8, draft_n_accepted=6),),
    )  # fmt: skip
    first = Timings(
        prompt_n=100, prompt_ms=1_000.0, predicted_n=11, predicted_ms=100.0, ttft_ms=1_100.0, n_past=110, draft_n=8,
        draft_n_accepted=6, speculation=drafted,
    )  # fmt: skip
    second = Timings(
        cache_n=110, prompt_n=50, prompt_ms=500.0, predicted_n=31, predicted_ms=600.0, ttft_ms=520.0, n_past=190,
        draft_n=8, draft_n_accepted=6, speculation=msgspec.structs.replace(drafted, by_position=((8, 6),)),
    )  # fmt: skip
    whole = first.followed_by(second)
    assert (whole.cache_n, whole.prompt_n, whole.predicted_n, whole.draft_n) == (0, 150, 42, 16)
    assert (whole.ttft_ms, whole.n_past) == (1_100.0, 190)
    assert whole.predicted_per_second == pytest.approx(1e3 * (10 + 30) / 700)
    assert whole.prompt_per_second == pytest.approx(100.0)
    assert whole.speculation == SpeculationFigures(
        passes=9, draft_n=16, draft_n_accepted=12, by_position=((12, 9), (4, 3)),
        by_drafter=(DrafterCount(name="suffix", draft_n=16, draft_n_accepted=12),),
    )  # fmt: skip
    assert whole.tokens_per_pass == pytest.approx(41 / 9)
    nothing = first.followed_by(Timings(n_past=111))
    assert (nothing.predicted_n, nothing.predicted_per_second) == (11, first.predicted_per_second)
