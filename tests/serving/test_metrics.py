"""Tests the page for Prometheus, and what it says about drafts."""

from __future__ import annotations

import pytest

from cpuchat.protocol.messages import (
    GenerationFinished,
    ModelLoaded,
    PrefillProgress,
    Speculation,
    SpeculationUpdate,
    TextDelta,
)
from cpuchat.protocol.timings import Timings
from cpuchat.serving.metrics import ServingMetrics
from cpuchat.serving.replies import ReplyProgress
from cpuchat.telemetry.meter import Meter
from tests.support.scripted_backend import DRAFTING, WITH_DRAFT

STATE = {"running": 1, "waiting": 2, "limit": 16}
TIMINGS = Timings(
    cache_n=8, prompt_n=100, prompt_ms=500, predicted_n=413, predicted_ms=9952, draft_n=470, draft_n_accepted=346,
    ttft_ms=600, n_past=520, n_ctx=8192, speculation=DRAFTING,
)  # fmt: skip


def samples(metrics: ServingMetrics, meter: Meter) -> dict[str, float]:
    page = metrics.page(("chat",), STATE, WITH_DRAFT, meter.figures(1.0)).decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    return {name.removeprefix("cpuchat_"): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_answers_add_up() -> None:
    metrics = ServingMetrics()
    for _ in range(2):
        metrics.count_request("chat", "ok")
        metrics.count_queued(0.5)
        metrics.count_answer(TIMINGS, 1.1)
    found = samples(metrics, Meter())
    assert found['requests_total{endpoint="chat",result="ok"}'] == 2
    assert found['requests_total{endpoint="chat",result="failed"}'] == 0
    assert (found["requests_running"], found["requests_waiting"], found["requests_waiting_limit"]) == (1, 2, 16)
    assert found["prompt_tokens_total"] == 200
    assert found["prompt_tokens_cached_total"] == 16
    assert found["predicted_tokens_total"] == 826
    assert found["decode_steps_total"] / found["passes_total"] == 412 / 66
    assert found["draft_tokens_accepted_total"] / found["draft_tokens_total"] == 346 / 470
    assert (found["queue_seconds_sum"], found["queue_seconds_count"]) == (1, 2)
    assert found["time_to_first_token_seconds_sum"] == 2.2


def test_gauges_tell_the_last_answer_and_unknown_ones_are_left_out() -> None:
    meter = Meter()
    assert "acceptance_ratio" not in samples(ServingMetrics(), meter)
    meter.observe(ModelLoaded(model=WITH_DRAFT), 0.0)
    meter.expect(Speculation(drafters=("draft",)))
    meter.request_started(0.0)
    meter.observe(GenerationFinished(request_id=1, stop_reason="end", timings=TIMINGS), 0.5)
    found = samples(ServingMetrics(), meter)
    assert found["acceptance_ratio"] == pytest.approx(346 / 470)
    assert found["tokens_per_pass"] > 6
    assert found["read_bandwidth_bytes_per_second"] > 0
    assert found["context_used_tokens"] == 520


@pytest.mark.parametrize("drafting", [False, True])
def test_a_cut_answer_is_counted_as_far_as_its_events_tell(drafting: bool) -> None:
    metrics, progress = ServingMetrics(), ReplyProgress()
    progress.follow(PrefillProgress(request_id=1, processed=40, total=40, cache_n=8), 10.0)
    progress.follow(TextDelta(request_id=1, text="a", n_tokens=1, predicted_n=1, at_ms=700.0), 11.0)
    if drafting:
        progress.follow(SpeculationUpdate(request_id=1, predicted_n=413, figures=DRAFTING), 12.0)
    progress.follow(TextDelta(request_id=1, text="b", n_tokens=419, predicted_n=420, at_ms=9000.0), 13.0)
    metrics.count_answer(progress.timings, None)
    found = samples(metrics, Meter())
    assert found["predicted_tokens_total"] == 420 and found["decode_steps_total"] == 419
    assert found["passes_total"] == (DRAFTING.passes if drafting else 419)
    assert found["draft_tokens_total"] == (DRAFTING.draft_n if drafting else 0)
