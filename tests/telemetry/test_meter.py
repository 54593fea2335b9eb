from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.protocol.messages import (
    ContextTrimmed,
    Event,
    Failed,
    GenerationFinished,
    LoadCancelled,
    LoadProgress,
    ModelLoaded,
    PrefillProgress,
    TextDelta,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.telemetry.meter import Meter, ReasoningTime
from cpuchat.telemetry.metric import Metric
from cpuchat.telemetry.roofline import Reach
from tests.support.scripted_backend import Gate, answer

INFO = ModelInfo(
    path="/m.gguf", name="m", architecture="llama", quantization="Q8_0", n_params=1, size=1, n_ctx=4096,
    n_ctx_train=4096, n_vocab=10, n_layer=1, n_threads=1,
)  # fmt: skip


def delta(at_ms: float, n: int, request: int = 1) -> TextDelta:
    return TextDelta(request_id=request, text="x", predicted_n=n, at_ms=at_ms)


def steady(meter: Meter, rate: float, seconds: float, start_ms: float = 200.0, request: int = 1) -> None:
    for i in range(int(rate * seconds) + 1):
        at = start_ms + i / rate * 1e3
        meter.observe(delta(at, i + 1, request), 10 + at / 1e3)


def test_the_way_of_one_answer():
    meter = Meter()
    assert meter.figures().phase == "idle"
    meter.observe(LoadProgress(phase="reading", done=25, total=100), 0.0)
    assert (meter.figures().phase, meter.figures().load_fraction) == ("loading", 0.25)
    meter.observe(ModelLoaded(model=INFO), 1.0)
    figures = meter.figures()
    assert (figures.phase, figures.load_fraction, figures.n_ctx.value, figures.n_past.value) == ("idle", None, 4096, 0)

    meter.request_started(10.0)
    assert meter.figures().phase == "prefill"
    meter.observe(PrefillProgress(request_id=1, processed=100, total=300, cache_n=100), 10.0)
    meter.observe(PrefillProgress(request_id=1, processed=200, total=300, cache_n=100), 10.5)
    figures = meter.figures()
    assert (figures.prefill_processed, figures.prefill_total, figures.prefill_cached.value) == (200, 300, 100)
    assert figures.prefill_tok_s.value == pytest.approx(200)

    steady(meter, rate=20, seconds=3, start_ms=1000)
    figures = meter.figures()
    assert figures.phase == "decoding"
    assert figures.ttft_s.value == pytest.approx(1.0)
    assert figures.live_tok_s.value == pytest.approx(20)
    assert figures.decode_tok_s.value == pytest.approx(20)
    assert figures.predicted_n == 61
    assert figures.n_past.value == 360  # the newest token is not evaluated yet
    assert figures.history == pytest.approx([20.0] * 6)

    timings = Timings(
        cache_n=100, prompt_n=200, prompt_ms=500, predicted_n=62, predicted_ms=3050, ttft_ms=990, n_past=362, n_ctx=4096
    )
    meter.observe(GenerationFinished(request_id=1, stop_reason="end", timings=timings), 14.0)
    figures = meter.figures()
    assert (figures.phase, figures.stop_reason, figures.n_past.value) == ("done", "end", 362)
    assert figures.prefill_tok_s.value == pytest.approx(400)
    assert figures.decode_tok_s.value == pytest.approx(20)
    assert figures.ttft_s.value == pytest.approx(0.99)
    assert figures.live_tok_s.value is None


def test_live_follows_the_last_second_and_decode_the_whole_answer():
    meter = Meter()
    steady(meter, rate=50, seconds=4)
    steady_end = 200 + 4000
    for i in range(1, 31):
        meter.observe(delta(steady_end + i * 100, 201 + i), 0.0)
    figures = meter.figures()
    assert figures.live_tok_s.value == pytest.approx(10)
    assert figures.decode_tok_s.value == pytest.approx(230 / 7)


def test_a_pass_with_drafts_in_no_time_is_no_speed():
    meter = Meter()
    for at_ms, n in ((210.0, 1), (212.0, 6)):
        meter.observe(delta(at_ms, n), 0.0)
    assert meter.figures().live_tok_s.value is meter.figures().decode_tok_s.value is None
    meter.observe(delta(410.0, 11), 0.0)
    assert meter.figures().live_tok_s.value == meter.figures().decode_tok_s.value == pytest.approx(50)


def test_a_stall_shows():
    """The last second moves on with the clock once the next token is overdue."""
    meter = Meter()
    steady(meter, rate=20, seconds=2)
    newest = 10 + 2.2
    assert meter.figures(newest + 0.09).live_tok_s.value == pytest.approx(20)
    assert meter.figures(newest + 0.6).live_tok_s.value == pytest.approx(10)
    assert meter.figures(newest + 1.2).live_tok_s.value == meter.figures(newest + 60).live_tok_s.value == 0
    meter.observe(delta(62_200, 42), newest + 60)
    assert meter.figures(newest + 60).live_tok_s.value == pytest.approx(1 / 60)
    slow = Meter()
    steady(slow, rate=0.5, seconds=10)
    assert slow.figures(10 + 10.2 + 3).live_tok_s.value == pytest.approx(0.5)
    assert slow.figures(10 + 10.2 + 6).live_tok_s.value == 0


def test_history_is_bounded_and_goes_on_over_answers():
    meter = Meter()
    steady(meter, rate=10, seconds=50)
    steady(meter, rate=30, seconds=20, request=2)
    history = meter.figures().history
    assert len(history) == 120
    assert history[-40:] == pytest.approx([30.0] * 40)
    assert history[0] == pytest.approx(10)


def test_a_new_request_starts_fresh():
    meter = Meter()
    meter.observe(ModelLoaded(model=INFO), 0.0)
    steady(meter, rate=10, seconds=2)
    meter.observe(GenerationFinished(request_id=1, stop_reason="end", timings=Timings(predicted_n=21)), 5.0)
    meter.request_started(6.0)
    figures = meter.figures()
    assert (figures.phase, figures.predicted_n, figures.ttft_s.value, figures.stop_reason) == ("prefill", 0, None, None)
    meter.observe(ContextTrimmed(request_id=2, dropped_messages=2, dropped_tokens=50, n_ctx=4096), 6.0)
    meter.observe(PrefillProgress(request_id=2, processed=40, total=40, cache_n=0), 8.0)
    assert meter.figures().prefill_tok_s.value == pytest.approx(20)
    unannounced = Meter()
    steady(unannounced, rate=10, seconds=2)
    unannounced.observe(delta(100, 1, request=2), 20.0)
    assert unannounced.figures().predicted_n == 1


def test_failures_and_unloading():
    meter = Meter()
    meter.observe(LoadProgress(phase="reading", done=1, total=0), 0.0)
    assert meter.figures().load_fraction is None
    meter.observe(Failed(code="model_damaged", message="no", request_id=1), 0.0)
    assert meter.figures().phase == "idle"
    meter.observe(ModelLoaded(model=INFO), 0.0)
    meter.request_started(1.0)
    meter.observe(Failed(code="worker_died", message="no", request_id=1), 2.0)
    assert meter.figures().phase == "done"
    assert (meter.figures().stop_reason, meter.figures().failed) == (None, True)
    assert meter.figures().decode_tok_s.why == "no tokens generated"
    meter.request_started(2.0)
    meter.observe(Failed(code="worker_died", message="no"), 2.0)  # without a request
    assert (meter.figures().phase, meter.figures().failed) == ("done", True)
    meter.unloaded()
    assert (meter.figures().phase, meter.figures().n_ctx.value) == ("done", None)
    meter.observe(LoadCancelled(), 3.0)
    assert meter.figures().n_ctx.value is None
    assert meter.figures().n_past.why == "no model loaded"
    assert meter.figures().phase == "done"  # not "no answer yet" beside the figures of one


def test_a_load_in_front_of_an_answer_is_no_prefill():
    meter = Meter()
    meter.request_started(0.0)
    meter.observe(LoadProgress(phase="reading", done=1, total=2), 1.0)
    meter.observe(ModelLoaded(model=INFO), 100.0)
    meter.observe(PrefillProgress(request_id=1, processed=0, total=40, cache_n=0), 100.0)
    assert meter.figures().phase == "prefill"
    meter.observe(PrefillProgress(request_id=1, processed=40, total=40, cache_n=0), 102.0)
    assert meter.figures().prefill_tok_s.value == pytest.approx(20)


@pytest.mark.parametrize(("per_token", "per_pair"), [(0.001, 0.0), (0.001, 1e-6), (0.0, 1e-6)])
def test_the_time_left_for_a_prompt_counts_on_slower_tokens_later(per_token, per_pair):
    def takes(n: int) -> float:
        return per_token * n + per_pair * n * n / 2

    meter = Meter()
    meter.request_started(5.0)
    assert meter.prefill_left_s() is None
    for done in range(512, 8193, 512):
        meter.observe(PrefillProgress(request_id=1, processed=done, total=8192, cache_n=0), 5.0 + takes(done))
        if done == 2048:
            assert meter.prefill_left_s() == pytest.approx(takes(8192) - takes(2048), rel=0.05)
    assert meter.prefill_left_s() is None


def test_the_time_left_for_a_prompt_falls_between_two_batches():
    meter = Meter()
    meter.reach = Reach(compute_tok_s=100.0)
    meter.request_started(0.0)
    meter.observe(PrefillProgress(request_id=1, processed=0, total=2000, cache_n=0), 0.0)
    assert [meter.figures(now).prefill_left_s for now in (0.0, 5.0, 90.0)] == [20, 15, 1]  # predicted
    meter.observe(PrefillProgress(request_id=1, processed=500, total=2000, cache_n=0), 10.0)
    assert [meter.figures(now).prefill_left_s for now in (10.0, 14.0, 99.0)] == [30, 26, 1]


def test_prefill_of_a_server_runs_from_its_first_progress():
    served = msgspec.structs.replace(INFO, server="llama-server at 127.0.0.1:8080")
    meter = Meter()
    meter.observe(ModelLoaded(model=served), 0.0)
    meter.request_started(0.0)
    meter.observe(PrefillProgress(request_id=1, processed=100, total=300, cache_n=100), 5.0)  # after a queue
    assert meter.figures().prefill_tok_s.value is None
    meter.observe(PrefillProgress(request_id=1, processed=300, total=300, cache_n=100), 6.0)
    assert (meter.figures().prefill_tok_s.value, meter.figures().prefill_cached.value) == (200, 100)


def test_a_prompt_of_a_server_that_only_reports_its_size_has_no_rate_and_no_reused_tokens():
    flag = "start vLLM with --flag"
    pairs = tuple((figure, flag) for figure in ("prefill_tok_s", "prefill_cached"))
    meter = Meter()
    meter.observe(ModelLoaded(model=msgspec.structs.replace(INFO, server="vLLM at x", unreported=pairs)), 0.0)
    whole = PrefillProgress(request_id=1, processed=300, total=300, cache_n=0)
    for reused in (False, True):
        meter.request_started(0.0)
        for event in (whole, delta(500.0, 1)):
            meter.observe(event, 0.5)
        figures = meter.figures()
        assert (figures.prefill_tok_s.value, figures.prefill_cached.value, figures.n_past.value) == (None, None, 300)
        assert {figures.prefill_tok_s.why, figures.prefill_cached.why} == {"at the end" if reused else flag}
        timings = Timings(prompt_n=300, prompt_ms=100.0, predicted_n=1, ttft_ms=500.0, reused_known=False)
        finished = GenerationFinished(request_id=1, stop_reason="end", timings=timings)
        meter.observe(finished, 1.0)
        assert (meter.figures().prefill_tok_s.value, meter.figures().prefill_cached.value) == (None, None)
        timings = msgspec.structs.replace(timings, prompt_n=100, cache_n=200, reused_known=True)
        meter.observe(msgspec.structs.replace(finished, timings=timings), 1.0)
        assert (meter.figures().prefill_tok_s.value, meter.figures().prefill_cached.value) == (1000, 200)
        assert meter.figures().on_server and not meter.figures().unreported


def metrics(figures: object) -> list[Metric[object]]:
    """Return all figures of a record."""
    values = (getattr(figures, field.name) for field in dataclasses.fields(figures))  # type: ignore[arg-type]
    return [value for value in values if isinstance(value, Metric)]


def test_a_figure_is_a_value_or_a_reason():
    assert Metric.of(0.0, "no token yet") == Metric(0.0)
    assert Metric.of(None, "no token yet").why == "no token yet"
    for value, why in ((None, ""), (1.0, "no token yet")):
        with pytest.raises(ValueError, match="a value or a reason"):
            Metric(value, why)


events = st.one_of(
    st.builds(LoadProgress, phase=st.just("reading"), done=st.integers(0, 100), total=st.integers(0, 100)),
    st.just(ModelLoaded(model=INFO)),
    st.just(LoadCancelled()),
    st.builds(Failed, code=st.just("x"), message=st.just("y")),
    st.builds(
        PrefillProgress,
        request_id=st.integers(1, 3),
        processed=st.integers(0, 99),
        total=st.integers(0, 99),
        cache_n=st.integers(0, 99),
    ),
    st.builds(delta, st.floats(0, 1e5), st.integers(0, 1000), st.integers(1, 3)),
    st.builds(
        GenerationFinished,
        request_id=st.integers(1, 3),
        stop_reason=st.sampled_from(["end", "cancelled"]),
        timings=st.just(Timings()),
    ),
)


@given(st.lists(events, max_size=40))
def test_any_order_of_events_gives_figures_or_a_reason(sequence: list[Event]):
    meter = Meter()
    for i, event in enumerate(sequence):
        meter.observe(event, float(i))
        figures = meter.figures(i + 3.0)
        assert all((figure.value is None) == bool(figure.why) for figure in metrics(figures))
        assert not figures.on_server


def test_reasoning_ends_with_the_first_text_of_the_answer_and_each_answer_has_its_own():
    clock, found = ReasoningTime(), []
    for reasoning, text in (("", "Yes no"), ("a b c d", "Yes no"), ("a b", "Yes"), ("a b", "")):  # 25 ms a word
        for step in answer(text, reasoning=reasoning):
            event = None if isinstance(step, Gate) else clock.of(step)
            if isinstance(event, GenerationFinished):
                found.append((event.timings.reasoning_n, event.timings.reasoning_ms))
    assert found == [(0, 0.0), (4, 100.0), (2, 50.0), (2, 50.0)]
