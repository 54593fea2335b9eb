"""Tests the figures of an answer from what servers tell."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cpuchat.backend.remote.stream import Attempt, Chunk, Reported, StreamTally
from cpuchat.protocol.messages import PrefillProgress, ServerLoad, SpeculationUpdate, TextDelta
from cpuchat.protocol.timings import Timings


def reported(n: int, ms: float, **more: object) -> Reported:
    counts = {"cache_n": 10, "prompt_n": 90, "prompt_ms": 400.0, "predicted_n": n, "predicted_ms": ms}
    return Reported(**{**counts, **more})  # type: ignore[arg-type]


def tally(round_trip: float | None = 0.005) -> StreamTally:
    return StreamTally(1, 100.0, 4096, round_trip)


def test_rates_are_those_of_the_server_however_the_parts_arrive() -> None:
    one = tally()
    rates = []
    for n, late in enumerate((0.0, 0.5, 0.1, 0.9), 1):  # bursts of the network
        one.add(Chunk(content="x", reported=reported(n, 50.0 * (n - 1))), 100.5 + 0.05 * n + late)
        [delta] = one.deltas(101.0)
        assert isinstance(delta, TextDelta)
        rates.append((delta.predicted_n, delta.at_ms))
    assert [after[1] - before[1] for before, after in pairwise(rates)] == [50.0, 50.0, 50.0]
    timings = one.timings(7)
    assert timings.predicted_per_second == pytest.approx(20.0)
    assert (timings.cache_n, timings.prompt_n, timings.prompt_ms) == (10, 90, 400.0)
    assert timings.n_past == 103 and not timings.approximate


def test_the_first_token_is_split_into_network_queue_and_prefill() -> None:
    one = tally()
    one.add(Chunk(content="x", reported=reported(1, 5.0)), 100.630)
    timings = one.timings(7)
    assert timings.ttft_ms == pytest.approx(630.0)
    assert timings.network_ms == pytest.approx(5.0)
    assert timings.queue_ms == pytest.approx(630.0 - 400.0 - 5.0 - 5.0)


def test_only_waiting_for_other_requests_is_the_queue() -> None:
    one = tally()
    one.attempt = Attempt(started=102.0, connect_s=0.2)  # the first one was not answered
    one.add(Chunk(content="x", reported=Reported(prompt_total=9, prompt_ms=400.0, load_ms=1500.0)), 104.235)
    timings = one.timings(7)
    assert timings.ttft_ms == pytest.approx(4235.0)
    assert timings.network_ms == pytest.approx(205.0)  # connecting and a round trip
    assert timings.queue_ms == pytest.approx(2235.0 - 400.0 - 1500.0 - 205.0)


@pytest.mark.parametrize(
    ("before", "queue_ms"),
    [
        (None, 0.0),  # tokenizing, or this process was busy
        (Chunk(ahead=1), 30.0),
        (ServerLoad(request_id=1, running=1, waiting=1), 30.0),
        (ServerLoad(request_id=1, running=1, waiting=0), 0.0),
        (Chunk(reported=Reported(queue_ms=12.0)), 12.0),
    ],
)
def test_a_short_wait_is_the_queue_only_if_there_is_one(before: Chunk | ServerLoad | None, queue_ms: float) -> None:
    one = tally()
    if isinstance(before, ServerLoad):
        one.seen(before)
    elif before is not None:
        one.add(before, 100.01)
    one.add(Chunk(content="x", reported=reported(1, 5.0)), 100.440)
    assert one.timings(7).queue_ms == pytest.approx(queue_ms)


def test_shares_that_are_not_known_are_left_out() -> None:
    one = tally()
    one.add(Chunk(content="x"), 100.5)
    assert one.timings(7).network_ms is None and one.timings(7).queue_ms is None


def test_parts_are_counted_where_the_server_counts_no_tokens() -> None:
    one = tally()
    for n in range(5):
        one.add(Chunk(content="x"), 100.5 + 0.1 * n)
        one.deltas(101.0)
    timings = one.timings(7)
    assert timings.approximate and timings.predicted_n == 5 and not timings.reused_known
    assert timings.predicted_per_second == pytest.approx(10.0)


def test_usage_at_the_end_replaces_the_count() -> None:
    one = tally()
    for n in range(5):
        one.add(Chunk(content="xx"), 100.5 + 0.1 * n)
    one.add(Chunk(reported=Reported(prompt_total=20, predicted_n=10)), 101.0)
    timings = one.timings(7)
    assert not timings.approximate and timings.predicted_n == 10
    assert timings.predicted_ms == pytest.approx(400.0)
    assert timings.n_past == 29


def test_drafts_become_acceptance_and_tokens_per_pass() -> None:
    one = tally()
    for n in range(1, 62, 4):  # three of four drafted tokens accepted, and one more
        accepted = 3 * (n - 1) // 4
        one.add(Chunk(content="x", reported=reported(n, 10.0 * n, draft_n=n - 1, draft_n_accepted=accepted)), 100.5 + n)
        events = one.deltas(100.5 + n)
    [update] = [event for event in events if isinstance(event, SpeculationUpdate)]
    assert update.figures.source == "server"
    timings = one.timings(7)
    assert timings.draft_n_accepted / timings.draft_n == 0.75
    assert timings.tokens_per_pass == 4.0


def test_progress_of_the_prompt_is_reported_once_each() -> None:
    one = tally()
    first = one.add(Chunk(progress=(50, 100, 10)), 100.1)
    assert first == [PrefillProgress(request_id=1, processed=50, total=100, cache_n=10)]
    assert (one.timings(7).cache_n, one.timings(7).prompt_n, one.timings(7).n_past) == (10, 40, 50)  # if stopped now
    done = one.add(Chunk(progress=(100, 100, 10)), 100.2)
    assert len(done) == 1
    assert one.add(Chunk(content="x", reported=reported(1, 0.1)), 100.3) == []


def test_reasoning_and_answer_keep_their_channels() -> None:
    one = tally()
    one.add(Chunk(reasoning="hm ", reported=reported(1, 1.0)), 100.5)
    one.add(Chunk(content="yes", reported=reported(2, 2.0)), 100.6)
    deltas = [event for event in one.deltas(100.7) if isinstance(event, TextDelta)]
    assert [(delta.channel, delta.text) for delta in deltas] == [("reasoning", "hm "), ("answer", "yes")]
    assert sum(delta.n_tokens for delta in deltas) == 2


def test_counts_that_go_back_are_dropped() -> None:
    one = tally()
    one.add(Chunk(content="x", reported=reported(5, 50.0)), 100.5)
    one.add(Chunk(content="x", reported=reported(3, 10.0, draft_n=1, draft_n_accepted=9)), 100.6)
    assert one.lies == 2
    assert one.timings(7).predicted_n == 5 and one.timings(7).draft_n == 0


def test_nothing_written_gives_empty_figures() -> None:
    assert tally().timings(7) == Timings(n_ctx=4096, seed=7)
