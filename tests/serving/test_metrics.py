"""Tests the page for Prometheus, and what it says about drafts."""

from __future__ import annotations

import pytest

from cpuchat.protocol.messages import PrefillProgress, SpeculationUpdate, TextDelta
from cpuchat.protocol.timings import Timings
from cpuchat.serving.metrics import ServingMetrics
from cpuchat.serving.replies import ReplyProgress
from cpuchat.telemetry.meter import Meter
from tests.support.meter_states import STATES
from tests.support.scripted_backend import DRAFTING

TIMINGS = Timings(
    cache_n=8, prompt_n=100, prompt_ms=500, predicted_n=413, predicted_ms=9952, draft_n=470, draft_n_accepted=346,
    ttft_ms=600, n_past=520, n_ctx=8192, speculation=DRAFTING,
)  # fmt: skip


def metered(*meters: Meter) -> ServingMetrics:
    return ServingMetrics(
        {"requests_running": ("Running.", lambda: 1), "requests_waiting": ("Waiting.", lambda: 2)},
        lambda: dict(enumerate(meter.figures() for meter in meters or (Meter(),))),
    )


def samples(metrics: ServingMetrics) -> dict[str, float]:
    lines = [line for line in metrics.page().decode().splitlines() if not line.startswith("#")]
    return {name.removeprefix("cpuchat_"): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_answers_add_up() -> None:
    metrics = metered()
    for _ in range(2):
        metrics.requests.labels("chat", "ok").inc()
        metrics.count_answer(TIMINGS)
    found = samples(metrics)
    assert found['requests_total{endpoint="chat",result="ok"}'] == 2
    assert found['requests_total{endpoint="chat",result="failed"}'] == 0
    assert (found["requests_running"], found["requests_waiting"]) == (1, 2)
    assert found["prompt_tokens_total"] == 200
    assert found["prompt_tokens_cached_total"] == 16
    assert found["predicted_tokens_total"] == 826
    assert found["decode_steps_total"] / found["passes_total"] == 412 / 66
    assert found["draft_tokens_accepted_total"] / found["draft_tokens_total"] == 346 / 470


@pytest.mark.parametrize("drafting", [False, True])
def test_a_cut_answer_is_counted_as_far_as_its_events_tell(drafting: bool) -> None:
    metrics, progress = metered(), ReplyProgress()
    progress.follow(PrefillProgress(request_id=1, processed=40, total=40, cache_n=8), 10.0)
    progress.follow(TextDelta(request_id=1, text="a", n_tokens=1, predicted_n=1, at_ms=700.0), 11.0)
    if drafting:
        progress.follow(SpeculationUpdate(request_id=1, predicted_n=413, figures=DRAFTING), 12.0)
    progress.follow(TextDelta(request_id=1, text="b", n_tokens=419, predicted_n=420, at_ms=9000.0), 13.0)
    metrics.count_answer(progress.timings)
    found = samples(metrics)
    assert found["predicted_tokens_total"] == 420 and found["decode_steps_total"] == 419
    assert found["passes_total"] == (DRAFTING.passes if drafting else 419)
    assert found["draft_tokens_total"] == (DRAFTING.draft_n if drafting else 0)


def test_gauges_tell_the_answer_and_unknown_ones_are_left_out() -> None:
    meter = STATES["writing"][0]
    found, figures = samples(metered(meter)), meter.figures()
    assert found["decode_tokens_per_second"] == figures.tok_s.value
    assert found["bandwidth_utilization_ratio"] == figures.roofline.utilization.value
    assert "acceptance_ratio" not in samples(metered())


def test_speeds_of_several_answers_add_up_and_what_they_read_is_not_told() -> None:
    one, two = STATES["writing"][0], STATES["writing"][0]
    found, rate = samples(metered(one, two)), one.figures().tok_s.value
    assert rate is not None and found["decode_tokens_per_second"] == 2 * rate
    assert found['slot_decode_tokens_per_second{slot="1"}'] == rate
    assert "read_bandwidth_bytes_per_second" not in found and "read_bandwidth_peak_bytes_per_second" in found
