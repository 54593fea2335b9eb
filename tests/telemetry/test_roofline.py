"""Tests how close decoding is to what the machine can do."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from cpuchat.protocol.messages import (
    GenerationFinished,
    LoadCancelled,
    ModelLoaded,
    PrefillProgress,
    Speculation,
    TextDelta,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import SpeculationFigures, Timings
from cpuchat.telemetry.machine import Bandwidth, MachineSample, Peak, Power
from cpuchat.telemetry.meter import Meter
from cpuchat.telemetry.roofline import Decoding, Evaluated, Reach, after_answer, roofline
from tests.support.costs import work_of_size
from tests.telemetry.test_meter import INFO

GB = 1_000_000_000
MODEL = msgspec.structs.replace(
    INFO, n_threads=2, cpus=(0, 2), peak_read=50.0 * GB, cache_bytes=32 << 20, work=work_of_size(2 * GB)
)
WITH_DRAFT = msgspec.structs.replace(
    MODEL, draft_work=work_of_size(GB // 10), pass_ms=tuple(50.0 + 2 * n for n in range(32))
)
PLAIN = Evaluated(tokens=100, passes=100)
DRAFTED = Evaluated(tokens=100, passes=40, draft_passes=160, draft_n=160)


def decoding(tok_s: float, evaluated: Evaluated = PLAIN, n_past: int = 0) -> Decoding:
    return Decoding(tok_s, evaluated, n_past)


def with_(model: ModelInfo = MODEL, **more: object) -> ModelInfo:
    return msgspec.structs.replace(model, **more)


def test_plain_decoding():
    now = roofline(MODEL, decoding(20))
    assert now.bandwidth.value == now.estimate.value == pytest.approx(40 * GB)
    assert now.utilization.value == pytest.approx(0.8)
    assert now.ceiling_plain.value == pytest.approx(25)
    assert now.ceiling_accepted.value is None
    assert (now.source, now.limit, now.off, now.remark) == ("estimated", "memory", "", "")
    assert now.peak.value.source == "measured, 2 cores"
    assert now.bytes_per_pass.value == 2 * GB


def test_the_context_is_read_too_and_the_limit_of_plain_decoding_stays_the_same():
    long = with_(work=work_of_size(2 * GB, 100_000))
    now = roofline(long, decoding(15, n_past=9_999))
    assert now.bandwidth.value == pytest.approx(15 * 3 * GB)
    assert now.ceiling_plain.value == pytest.approx(50 / (2 + 651 * 1e5 / GB))
    assert roofline(long, decoding(25, DRAFTED)).ceiling_plain == now.ceiling_plain


def test_drafting_reads_the_draft_model_as_often_as_it_was_asked():
    now = roofline(WITH_DRAFT, decoding(25, DRAFTED))
    # 2.5 tokens a pass: 10 passes a second over 2 GB, each with 4 passes over 0.1 GB
    assert now.bandwidth.value == pytest.approx(10 * 2.4 * GB)
    assert now.ceiling_plain.value == pytest.approx(25)
    assert now.ceiling_accepted.value == pytest.approx(2.5 * 50 / 2.4)
    assert now.limit == ""


@pytest.mark.parametrize(
    ("model", "now"),
    [
        (MODEL, decoding(30)),
        (MODEL, dataclasses.replace(decoding(20), plain_tok_s=30.0)),
        (with_(pass_ms=(1e3 / 30,)), Decoding()),
    ],
    ids=["answer", "plain passes beside drafts", "calibration"],
)
def test_what_reads_more_raises_the_peak_and_everything_that_follows_from_it(model: ModelInfo, now: Decoding) -> None:
    """At once: no figure of the same time may rest on the one that was measured."""
    found = roofline(model, now)
    assert found.peak.value is not None and found.peak.value.at_least and found.rough
    assert found.peak.value.bytes_per_s == pytest.approx(60 * GB)
    assert found.ceiling_plain.value == pytest.approx(30) and found.off == ""
    if found.bandwidth.value is not None:
        assert found.utilization.value == pytest.approx(found.bandwidth.value / (60 * GB))
    assert roofline(MODEL, decoding(26)).peak.value == Peak(50 * GB, (0, 2))  # 104 % is luck
    short = Evaluated(tokens=9, passes=9)
    assert roofline(MODEL, decoding(40, short)).peak.value == Peak(50 * GB, (0, 2))


def test_an_estimated_peak_is_a_limit_that_is_rough_and_until_it_is_beaten():
    guessed = with_(peak_read=50.0 * GB, peak_estimated=True)
    now = roofline(guessed, decoding(24))
    assert (now.ceiling_plain.value, now.utilization.value) == (pytest.approx(25), pytest.approx(0.96))
    assert (
        now.rough and now.limit == "" and now.peak.value.source == "estimated for 2 cores, up to 2× off until measured"
    )
    assert roofline(guessed, decoding(30)).peak.value == Peak(60 * GB, (0, 2), at_least=True)


def test_what_caches_hold_raises_no_peak():
    now = roofline(with_(cache_bytes=GB), decoding(30))
    assert now.peak.value == Peak(50 * GB, (0, 2)) and now.utilization.value == pytest.approx(1.2)
    assert now.off == "above the memory peak: part of the weights stays in L3" and now.ceiling_plain.value is None


def test_reading_that_takes_most_of_a_pass_is_the_limit():
    assert [roofline(MODEL, decoding(rate)).limit for rate in (20, 18.7, 10)] == ["memory", "", ""]
    assert roofline(WITH_DRAFT, decoding(45, DRAFTED)).limit == "memory"
    assert roofline(with_(peak_read=0.0), decoding(20)).limit == ""


def test_a_model_that_fits_the_caches_has_no_memory_limit():
    toy = with_(work=work_of_size(8_000_000), draft_work=work_of_size(1_000_000))
    now = roofline(toy, decoding(9000))
    assert now.fits_cache
    assert now.bandwidth.value == pytest.approx(72 * GB)
    assert (now.utilization.value, now.ceiling_plain.value, now.off) == (None, None, "")
    assert now.utilization.why == now.ceiling_plain.why == "weights fit in L3: no limit"


def test_without_a_peak_there_is_a_figure_and_no_share():
    now = roofline(with_(peak_read=0.0), decoding(20))
    assert now.bandwidth.value == pytest.approx(40 * GB)
    assert now.utilization.why == "no peak · run cpuchat probe"
    assert now.peak.why == "not measured · run cpuchat probe"
    assert roofline(with_(work=None), decoding(20)).bandwidth.why == "no estimate for this model"


def counted(total: float, read: float | None = None) -> MachineSample:
    return MachineSample(bandwidth=Bandwidth(total * GB, "umc", read=None if read is None else read * GB))


def test_a_counter_has_the_word_and_the_estimate_stays_beside_it():
    now = roofline(MODEL, decoding(20), machine=counted(44, 42))
    assert (now.source, now.bandwidth.value, now.estimate.value) == ("umc", 42 * GB, pytest.approx(40 * GB))
    assert now.utilization.value == pytest.approx(0.84)
    assert now.remark == ""
    assert roofline(MODEL, decoding(20), machine=counted(44)).bandwidth.value == 44 * GB


def test_a_counter_above_the_peak_is_called_wrong_where_nothing_else_explains_it():
    over = roofline(MODEL, decoding(22), machine=counted(53))  # 106 % of the peak, 1.2 times the estimate
    assert over.utilization.value == pytest.approx(1.06) and over.remark == ""
    assert over.off == "counter above the measured peak"
    assert roofline(MODEL, decoding(22), machine=counted(52)).off == ""
    assert roofline(MODEL, decoding(10), machine=counted(53)).off == ""  # other load explains it


def test_counter_and_estimate_contradict_each_other():
    assert roofline(MODEL, decoding(20), machine=counted(53)).remark == "other load on this machine"
    assert roofline(MODEL, decoding(20), machine=counted(9)).remark == "cached, or the counter is wrong"
    toy = with_(work=work_of_size(8_000_000))
    assert roofline(toy, decoding(9000), machine=counted(1)).remark == ""


def test_a_whole_answer_counts_what_its_decoding_evaluated():
    timings = Timings(
        prompt_n=100, prompt_ms=500, predicted_n=101, predicted_ms=5000, n_past=301,
        speculation=SpeculationFigures(passes=40, draft_n=160, draft_passes=160),
    )  # fmt: skip
    now = after_answer(WITH_DRAFT, timings)
    assert now.bandwidth.value == pytest.approx((40 * 2 + 160 * 0.1) / 5 * GB)
    plain = after_answer(MODEL, msgspec.structs.replace(timings, speculation=None))
    assert plain.bandwidth.value == pytest.approx(20 * 2 * GB)
    assert after_answer(MODEL, Timings(predicted_n=1)).bandwidth.value is None
    newer = after_answer(MODEL, timings, Reach(peak=Peak(60 * GB, (0, 2))))  # as the panel
    assert newer.peak.value is not None and newer.peak.value.bytes_per_s == 60 * GB


# The meter


def written(meter: Meter, tok_s: float, seconds: float, start: int = 0) -> None:
    for n in range(start, start + int(tok_s * seconds) + 1):
        meter.observe(TextDelta(request_id=1, text="x", predicted_n=n + 1, at_ms=1e3 * n / tok_s), n / tok_s)


def started(model: ModelInfo = MODEL, prompt: int = 100) -> Meter:
    meter = Meter()
    meter.asked = Speculation(drafters=("draft",))
    meter.observe(ModelLoaded(model=model), 0.0)
    meter.request_started(0.0)
    meter.observe(PrefillProgress(request_id=1, processed=prompt, total=prompt, cache_n=0), 0.5)
    return meter


def test_the_ceiling_is_known_before_the_first_answer():
    meter = Meter()
    meter.observe(ModelLoaded(model=MODEL), 0.0)
    now = meter.figures().roofline
    assert now.ceiling_plain.value == pytest.approx(25)
    assert (now.bandwidth.value, now.bandwidth.why) == (None, "no answer yet")
    meter.observe(LoadCancelled(), 1.0)
    assert meter.figures().roofline.ceiling_plain.why == "no model loaded"


def test_only_decoding_has_a_bandwidth_and_its_average_stays():
    meter = started()
    assert meter.figures().roofline.bandwidth.value is None
    written(meter, 20, 4)
    assert meter.figures().roofline.bandwidth.value == pytest.approx(40 * GB)
    timings = Timings(prompt_n=100, prompt_ms=400, predicted_n=81, predicted_ms=8000, n_past=181)
    meter.observe(GenerationFinished(request_id=1, stop_reason="end", timings=timings), 9.0)
    now = meter.figures().roofline
    assert now.bandwidth.value == pytest.approx(20 * GB)
    assert now.utilization.value == pytest.approx(0.4)
    meter.request_started(10.0)
    assert meter.figures().roofline.bandwidth.value is None


def test_counters_are_averaged_over_the_answer():
    meter = started()
    meter.machine(MachineSample(Bandwidth(1e9, "umc"), Power(50, 100, "rapl")))  # reading the prompt
    written(meter, 10, 1)
    meter.machine(MachineSample(Bandwidth(20e9, "umc"), Power(100, 200, "rapl")))
    now = meter.figures().roofline
    assert (now.bandwidth.value, now.source, now.watts.value, now.joules_per_token.value) == (20e9, "umc", 100, None)
    assert now.joules_per_token.why == "answer too short"
    written(meter, 10, 1, start=11)
    meter.machine(MachineSample(Bandwidth(30e9, "umc"), Power(120, 233, "rapl")))
    assert meter.figures().roofline.bandwidth.value == 25e9
    timings = Timings(predicted_n=22, predicted_ms=2100, n_past=122)
    meter.observe(GenerationFinished(request_id=1, stop_reason="end", timings=timings), 9.0)
    meter.machine(MachineSample(Bandwidth(1e9, "umc"), Power(40, 999, "rapl")))
    now = meter.figures().roofline
    assert (now.bandwidth.value, now.watts.value, now.joules_per_token.value) == (25e9, 110, pytest.approx(33 / 11))
