"""Tests figures of drafting: from the worker's counts to what is shown."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.protocol.messages import GenerationFinished, ModelLoaded, Speculation, SpeculationUpdate, TextDelta
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.protocol.timings import DrafterCount, SpeculationFigures, Timings
from cpuchat.telemetry.meter import Meter
from tests.telemetry.test_meter import INFO, steady

ASKED = Speculation(drafters=("suffix", "draft"))
FIGURES = SpeculationFigures(
    passes=50,
    draft_n=200,
    draft_n_accepted=150,
    by_position=((50, 45), (50, 40)),
    by_drafter=(DrafterCount(name="draft", draft_n=200, draft_n_accepted=150),),
    drafter="draft",
    depth=4,
    draft_ms=500.0,
    plain_ms=40.0,
)


def started(asked: Speculation = ASKED) -> Meter:
    meter = Meter()
    meter.asked = asked
    meter.request_started(0.0)
    return meter


def test_no_comparison_with_plain_decoding_beside_other_programs() -> None:
    meter = started()
    meter.observe(ModelLoaded(model=msgspec.structs.replace(INFO, pass_ms=(5.0,) * 32)), 0.0)
    steady(meter, rate=50, seconds=4)
    figures = msgspec.structs.replace(FIGURES, plain_ms=None, disturbed=True)
    meter.observe(SpeculationUpdate(request_id=1, predicted_n=200, figures=figures), 4.0)
    now = meter.figures().drafting
    assert now.plain_tok_s.value is now.speed_up.value is None
    assert now.plain_tok_s.why == now.speed_up.why == "busy cores"
    for drafted in (FIGURES, SpeculationFigures(passes=199)):  # the threads waited since it was told last
        meter.observe(SpeculationUpdate(request_id=1, predicted_n=200, figures=drafted), 4.0)
        delta = TextDelta(request_id=1, text="a", predicted_n=201, at_ms=4100.0, cpu_wait=0.4)
        meter.observe(delta, 4.1)
        now = meter.figures().drafting
        assert now.plain_tok_s.value is now.speed_up.value is None


def test_figures_while_writing() -> None:
    meter = started()
    steady(meter, rate=50, seconds=4)
    meter.observe(SpeculationUpdate(request_id=1, predicted_n=200, figures=FIGURES), 4.0)
    now = meter.figures().drafting
    assert now.acceptance.value == pytest.approx(0.75)
    assert now.tokens_per_pass.value == pytest.approx(199 / 50)  # the prompt gives the first token
    assert now.counts == FIGURES
    assert (now.depth, now.adaptive, now.off) == (4, True, None)
    assert now.draft_share.value == pytest.approx(500 / 4000)
    assert now.plain_tok_s.value == pytest.approx(25)
    assert now.speed_up.value == pytest.approx(2.0)


def test_the_finished_answer_has_the_last_word() -> None:
    meter = started()
    steady(meter, rate=50, seconds=4)
    meter.observe(SpeculationUpdate(request_id=1, predicted_n=100, figures=SpeculationFigures(passes=1)), 4.0)
    timings = Timings(predicted_n=201, predicted_ms=5000, draft_n=200, speculation=FIGURES)
    meter.observe(GenerationFinished(request_id=1, stop_reason="end", timings=timings), 5.0)
    now = meter.figures().drafting
    assert now.tokens_per_pass.value == timings.tokens_per_pass == pytest.approx(200 / 50)
    assert now.draft_share.value == pytest.approx(0.1)
    assert now.speed_up.value == pytest.approx(timings.speed_up)


def test_an_answer_without_a_draft_is_the_plain_speed_itself() -> None:
    meter = started()
    steady(meter, rate=50, seconds=4)
    figures = SpeculationFigures(passes=200, plain_ms=12.0, off=DraftsOff("low acceptance", acceptance=0.3))
    timings = Timings(predicted_n=201, predicted_ms=5000, speculation=figures)
    meter.observe(GenerationFinished(request_id=1, stop_reason="end", timings=timings), 5.0)
    now = meter.figures()
    assert now.drafting.plain_tok_s.value == now.decode_tok_s.value == pytest.approx(40)


def test_what_the_model_cost_when_it_was_measured_counts_until_it_is_known_better() -> None:
    meter = Meter()
    meter.asked = ASKED
    meter.observe(ModelLoaded(model=msgspec.structs.replace(INFO, pass_ms=(50.0, 60.0))), 0.0)
    assert meter.figures().drafting.plain_tok_s.value == pytest.approx(20)
    meter.observe(SpeculationUpdate(request_id=1, predicted_n=50, figures=FIGURES), 1.0)
    assert meter.figures().drafting.plain_tok_s.value == pytest.approx(25)


def test_a_model_that_cannot_take_back_says_so_before_its_first_answer() -> None:
    meter = Meter()
    meter.asked = ASKED
    off = DraftsOff("model", note="this model cannot take back a token")
    meter.observe(ModelLoaded(model=msgspec.structs.replace(INFO, drafts_off=off)), 0.0)
    assert meter.figures().drafting.off == off


def test_nothing_drafted_is_no_speed_up() -> None:
    meter = started()
    steady(meter, rate=50, seconds=2)
    figures = SpeculationFigures(passes=100, plain_ms=40.0, off=DraftsOff("low acceptance", acceptance=0.3))
    meter.observe(SpeculationUpdate(request_id=1, predicted_n=100, figures=figures), 2.0)
    now = meter.figures().drafting
    assert (now.speed_up.value, now.acceptance.value, now.depth, now.tokens_per_pass.value) == (None, None, 0, None)
    assert now.speed_up.why == "nothing drafted"
    assert now.draft_share.value is None
    timings = Timings(predicted_n=100, predicted_ms=1000, speculation=figures)
    assert timings.tokens_per_pass is timings.speed_up is None


def test_the_share_of_drafting_waits_until_there_is_something_to_share() -> None:
    meter = started()
    meter.observe(TextDelta(request_id=1, text="x", predicted_n=1, at_ms=100), 0.1)
    meter.observe(SpeculationUpdate(request_id=1, predicted_n=1, figures=FIGURES), 0.1)
    now = meter.figures().drafting
    assert now.draft_share.value is None
    assert now.draft_share.why == "answer too short"
