"""Tests the figures of an answer from what servers tell."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cpuchat.backend.remote.stream import Chunk, StreamTally
from cpuchat.protocol.messages import PrefillProgress, SpeculationUpdate, TextDelta


def reported(n: int, ms: float, **more: float) -> dict[str, float]:
    return {"cache_n": 10, "prompt_n": 90, "prompt_ms": 400.0, "predicted_n": n, "predicted_ms": ms, **more}


def tally() -> StreamTally:
    return StreamTally(1, 100.0, 4096)


def test_rates_are_those_of_the_server_however_the_parts_arrive() -> None:
    one = tally()
    rates = []
    for n, late in enumerate((0.0, 0.5, 0.1, 0.9), 1):  # bursts of the network
        one.add(Chunk(content="x", figures=reported(n, 50.0 * (n - 1))), 100.5 + 0.05 * n + late)
        [delta] = one.deltas()
        assert isinstance(delta, TextDelta)
        rates.append((delta.predicted_n, delta.at_ms))
    assert [after[1] - before[1] for before, after in pairwise(rates)] == [50.0, 50.0, 50.0]
    timings = one.timings(7)
    assert timings.predicted_per_second == pytest.approx(20.0)
    assert (timings.cache_n, timings.prompt_n, timings.prompt_ms) == (10, 90, 400.0)
    assert timings.n_past == 103 and not timings.approximate


def test_parts_are_counted_where_the_server_counts_no_tokens_until_usage_at_the_end_does() -> None:
    one = tally()
    for n in range(5):
        one.add(Chunk(content="x"), 100.5 + 0.1 * n)
        one.deltas()
    timings = one.timings(7)
    assert timings.approximate and timings.predicted_n == 5 and not timings.reused_known
    assert timings.predicted_per_second == pytest.approx(10.0)
    one.add(Chunk(figures={"prompt_total": 20, "predicted_n": 10}), 101.0)
    timings = one.timings(7)
    assert not timings.approximate and (timings.predicted_n, timings.n_past) == (10, 29)
    assert timings.predicted_ms == pytest.approx(400.0)


def test_drafts_become_acceptance_and_tokens_per_pass() -> None:
    one = tally()
    for n in range(1, 62, 4):  # three of four drafted tokens accepted, and one more
        accepted = 3 * (n - 1) // 4
        one.add(Chunk(content="x", figures=reported(n, 10.0 * n, draft_n=n - 1, draft_n_accepted=accepted)), 100.5 + n)
        events = one.deltas()
    [update] = [event for event in events if isinstance(event, SpeculationUpdate)]
    assert update.figures.source == "server"
    timings = one.timings(7)
    assert timings.draft_n_accepted / timings.draft_n == 0.75
    assert timings.tokens_per_pass == 4.0


def test_progress_of_the_prompt_is_reported_once_each() -> None:
    one = tally()
    first = one.add(Chunk(figures={"processed": 50, "total": 100, "cache_n": 10}), 100.1)
    assert first == [PrefillProgress(request_id=1, processed=50, total=100, cache_n=10)]
    assert (one.timings(7).cache_n, one.timings(7).prompt_n, one.timings(7).n_past) == (10, 40, 50)  # if stopped now
    assert len(one.add(Chunk(figures={"processed": 100, "total": 100, "cache_n": 10}), 100.2)) == 1
    assert one.add(Chunk(content="x", figures=reported(1, 0.1)), 100.3) == []


def test_reasoning_and_answer_keep_their_channels() -> None:
    one = tally()
    one.add(Chunk(reasoning="hm ", figures=reported(1, 1.0)), 100.5)
    one.add(Chunk(content="yes", figures=reported(2, 2.0)), 100.6)
    deltas = [event for event in one.deltas() if isinstance(event, TextDelta)]
    assert [(delta.channel, delta.text) for delta in deltas] == [("reasoning", "hm "), ("answer", "yes")]
    assert sum(delta.n_tokens for delta in deltas) == 2


def test_counts_that_go_back_are_dropped() -> None:
    one = tally()
    one.add(Chunk(content="x", figures=reported(5, 50.0)), 100.5)
    one.add(Chunk(content="x", figures=reported(3, 10.0, draft_n=1, draft_n_accepted=9)), 100.6)
    assert one.timings(7).predicted_n == 5 and one.timings(7).draft_n == 0
