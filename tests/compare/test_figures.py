"""Tests the figures of both sides against values computed by hand, and the sentence that says why."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.compare.agreement import Agreement
from cpuchat.compare.comparison import Comparison
from cpuchat.compare.figures import Value, figures_of
from cpuchat.compare.runner import Round, SideAnswer, Turn, parse_side
from cpuchat.config.settings import Settings
from cpuchat.models.library.library import Library
from cpuchat.present import compare
from cpuchat.protocol.messages import Failed, TextDelta
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import SpeculationFigures, Timings
from cpuchat.telemetry.roofline import after_answer
from tests.support.costs import work_of_size
from tests.support.recorded import agreed_answer
from tests.support.scripted_backend import MODEL, ScriptedBackend

NAMES = ("Q8_0", "Q4_K_M")
Q8 = msgspec.structs.replace(MODEL, work=work_of_size(1_600_000_000), peak_read=51e9)
Q4 = msgspec.structs.replace(Q8, quantization="Q4_K_M", work=work_of_size(960_000_000))


def answered(
    model: ModelInfo, tok_s: float, *, text: str = "word " * 50, stop: str = "end", **more: object
) -> SideAnswer:
    timings = Timings(
        prompt_n=100, prompt_ms=400.0, predicted_n=51, predicted_ms=50e3 / tok_s, ttft_ms=220.0, n_past=151, n_ctx=8192
    )
    timings = msgspec.structs.replace(timings, **more)
    answer = SideAnswer(content=text, stop_reason=stop, timings=timings, model=model)
    answer.written.add(TextDelta(request_id=1, text=text, n_tokens=51))
    answer.roofline = after_answer(model, timings)
    return answer


def a_round(a: SideAnswer, b: SideAnswer) -> Round:
    return Round(answers=(a, b))


def said(*rounds: Round) -> str:
    return compare.verdict(figures_of(rounds).verdict, NAMES)


def test_the_figures_by_hand() -> None:
    rows = figures_of([a_round(answered(Q8, 25.0), answered(Q4, 37.0))]).rows
    assert rows["tok_s"].a == Value(25.0, 25.0, 25.0, 1)
    assert rows["tok_s"].ratio == pytest.approx(1.48)
    assert rows["prefill"].a is not None and rows["prefill"].a.median == pytest.approx(250.0)
    assert rows["bytes"].a is not None and rows["bytes"].a.median == pytest.approx(1.6e9)
    assert rows["bytes"].ratio == pytest.approx(0.6)
    assert rows["bandwidth"].b is not None and rows["bandwidth"].b.median == pytest.approx(37 * 0.96e9)
    assert rows["utilization"].a is not None and rows["utilization"].a.median == pytest.approx(25 * 1.6 / 51)
    assert "joules" not in rows and "acceptance" not in rows


CACHED = [msgspec.structs.replace(one, cache_bytes=2_000_000_000) for one in (Q8, Q4)]


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        (answered(Q8, 25.0), answered(Q4, 37.0), "reads 40 % fewer bytes and is 1.48× as fast: 89 % of what the bytes"),
        (answered(Q8, 25.0), answered(Q4, 16.0), "1.56× as fast: memory is not what limits it."),
        (answered(Q8, 25.0), answered(Q8, 37.5), "Q4_K_M is 1.50× as fast as Q8_0."),
        (answered(CACHED[0], 25.0), answered(CACHED[1], 40.0), "L3 cache"),
        (answered(Q8, 25.0, stop="cancelled"), answered(Q4, 50.0), ""),
    ],
    ids=["allowed", "another-limit", "same-bytes", "cached", "stopped"],
)
def test_the_sentence_says_why_one_is_faster(a: SideAnswer, b: SideAnswer, sentence: str) -> None:
    text = said(a_round(a, b))
    assert sentence in text and bool(text) == bool(sentence)


def test_a_stopped_or_disturbed_round_takes_no_place() -> None:
    fair = a_round(answered(Q8, 25.0), answered(Q4, 37.0))
    stopped = a_round(answered(Q8, 25.0), answered(Q4, 50.0, stop="cancelled"))
    disturbed = a_round(answered(Q8, 25.0), answered(Q4, 70.0, cpu_wait=0.4))
    assert stopped.stopped and not fair.stopped
    sure = "Repeat it. Sure: Q4_K_M reads 40 % fewer bytes."
    assert said(disturbed) == f"Too noisy for a verdict: other programs were using the cores. {sure}"
    ratios = {label: ratio for label, *_, ratio in compare.rows(figures_of([disturbed]), NAMES)}
    assert (ratios["decode"], ratios["first token"], ratios["mean bytes per token"]) == ("–", "–", "0.60×")
    assert "F9 repeats, w waits" in compare.verdict(figures_of([disturbed]).verdict, NAMES, "F9", "w")
    worse = a_round(answered(Q8, 25.0), answered(Q4, 30.0, cpu_wait=0.6))
    assert Turn("Why?", [disturbed, worse]).counted() == [disturbed]
    assert Turn("Why?", [fair, stopped, disturbed]).counted() == [fair]
    assert Turn("Why?", [stopped]).counted() == [stopped]
    assert Turn("Why?", [disturbed]).counted() == Turn("Why?", [disturbed, stopped]).counted() == [disturbed]


def test_a_short_round_differs_more_by_itself() -> None:
    long, short = (said(a_round(answered(Q8, rate), answered(Q4, 1.48 * rate))) for rate in (25.0, 1250.0))
    assert "is 1.48× as fast" in long
    assert short == "Q4_K_M wrote 1.48× as fast; one round: a repeat makes it sure."
    tiny, whole = (a_round(*[answered(Q8, rate, cpu_wait=0.4)] * 2) for rate in (2500.0, 25.0))
    assert not tiny.disturbed and whole.disturbed  # some milliseconds are the system's own programs


def test_a_difference_within_the_noise_is_none_and_three_rounds_give_medians() -> None:
    one = figures_of([a_round(answered(Q8, 25.0), answered(Q4, 25.5))]).verdict
    assert compare.verdict(one, NAMES, "^R") == "Q4_K_M wrote 1.02× as fast; one round: ^R makes it sure."
    rounds = [a_round(answered(Q8, rate), answered(Q4, 1.1 * rate)) for rate in (20.0, 25.0, 30.0)]
    assert "is 1.10× as fast" in said(*rounds)  # though the machine became faster meanwhile
    unsteady = [a_round(answered(Q8, a), answered(Q4, b)) for a, b in ((20.0, 22.0), (25.0, 24.0), (30.0, 35.0))]
    assert said(*unsteady).startswith("Too close to tell after 3 rounds: ")
    assert said(*[a_round(answered(Q8, 25.0), answered(Q4, 25.1))] * 12) == "Equally fast: 1.00×, after 12 rounds."
    figures = figures_of(rounds)
    assert figures.medians and figures.rows["tok_s"].a == Value(25.0, 20.0, 30.0, 3)
    speeds = "25.00 tok/s (20.0–30.0)", "27.50 tok/s (22.0–33.0)"
    assert compare.rows(figures, NAMES)[1] == ("decode", *speeds, "1.10×")
    assert compare.cell("memory", Value(86.01e6, 86.0e6, 86.02e6, 3), spread=True) == "86.01 MB"


async def test_one_verdict_weighs_speed_words_and_memory_whatever_side_a_file_is_on() -> None:
    sides = [parse_side(name, Library([]).resolve) for name in ("demo", "demo-q4")]
    pair = Comparison((sides[0], sides[1]), Settings(), backend=ScriptedBackend)
    swapped = Comparison((sides[1], sides[0]), Settings(), backend=ScriptedBackend)
    for comparison in (pair, swapped):
        await comparison.learn_files()

    def lines(q8: float, q4: float, share: float = 0.97, n_rounds: int = 1) -> list[str] | None:
        answers = agreed_answer(share)
        rounds = [a_round(answered(Q8, q8), answered(Q4, q4)) for _ in range(n_rounds)]
        rounds[-1].agreement = Agreement(answers=(answers, answers))
        found = compare.choice(pair, Turn("Why?", rounds))
        for one in rounds:
            one.answers = one.answers[1], one.answers[0]
        other = compare.choice(swapped, Turn("Why?", rounds))
        assert (found and found[1]) == (other and other[1])
        return found[1] if found else None

    first, second = lines(37.0, 25.0) or []
    why = "(Q4_K_M takes more arithmetic on this CPU), nearly the original's words, +"
    assert first.startswith(f"Take Q8_0 here: 1.48× as fast {why}") and first.endswith(" of memory.")
    assert second.startswith("Q4_K_M if memory is short: 97 % of the same words on this answer; ")
    first, second = lines(25.0, 37.0) or []
    assert "Take Q4_K_M here: 1.48× as fast (a token reads 40 % fewer bytes), 97 % of the same words" in first
    assert second.startswith("Q8_0 if every word counts: nearly the original's words")
    first, second = lines(25.0, 37.0, share=0.7) or []
    assert first.startswith("Take Q8_0 here: nearly the original's words, +")
    assert second.startswith("Q4_K_M if speed matters more: 1.48× as fast, 70 % of the same words")
    assert (lines(25.0, 25.1, n_rounds=12) or [""])[0].startswith(
        "Take Q8_0 here: as fast, nearly the original's words"
    )
    assert "Take Q8_0 here: speeds too close to tell (" in str(lines(25.0, 25.5, n_rounds=3))
    assert lines(25.0, 25.5) is None  # more rounds may tell

    pair.turns = [Turn("Why?", [a_round(answered(Q8, 25.0), answered(Q4, rate)) for rate in (37.0, 37.1, 37.2)])]
    told = compare.as_json(pair)["verdict"]
    assert (told["caveat"], told["faster"], told["take"]) == (None, "B", None)  # the words are not known
    assert told["ratio"] == pytest.approx(1.484) and told["interval"][0] < 1.484 < told["interval"][1]
    assert "is 1.48× as fast" in told["reason"] and told["memory"] < 0
    pair.turns[0].rounds[1].agreement = Agreement(answers=(agreed_answer(0.97), agreed_answer(0.97)))
    told = compare.as_json(pair)["verdict"]  # of a repeat: the words are the same
    assert told["take"] == "B" and told["agreement"]["value"] == 0.97 and len(told["lines"]) == 2

    pair.turns[0].rounds[1:] = [a_round(answered(Q8, 25.0), SideAnswer())]  # of three, the second runs
    assert pair.seconds_left(3) == pytest.approx(1 * (0.22 + 50 / 25) + 2 * (0.22 + 50 / 37))


def test_a_round_with_an_answer_of_one_token_has_no_part_in_the_verdict() -> None:
    rounds = [a_round(answered(Q8, rate), answered(Q4, 1.5 * rate)) for rate in (25.0, 25.1, 24.9)]
    short = a_round(answered(Q8, 25.0, predicted_n=1, predicted_ms=0.0), answered(Q4, 37.5))
    for order in ([*rounds, short], [short, *rounds]):
        verdict = figures_of(order).verdict
        assert (verdict.kind, verdict.n_rounds) == ("bytes", 3)
    other = a_round(*reversed(short.answers))
    assert said(short, other, short).startswith("Too short for a verdict")


def test_drafts_show_acceptance_and_are_not_explained_by_bytes() -> None:
    drafted = SpeculationFigures(passes=20, draft_n=60, draft_n_accepted=30)
    fast = answered(Q8, 40.0, draft_n=60, draft_n_accepted=30, speculation=drafted)
    figures = figures_of([a_round(answered(Q8, 25.0), fast)])
    assert figures.rows["acceptance"].a is None
    assert figures.rows["acceptance"].b is not None and figures.rows["acceptance"].b.median == 0.5
    assert figures.rows["per_pass"].b is not None and figures.rows["per_pass"].b.median == 2.5
    assert "bytes" not in said(a_round(answered(Q8, 25.0), fast))


def test_a_side_that_failed_leaves_the_figures_of_the_other() -> None:
    failed = SideAnswer(failed=Failed(code="worker_died", message="The worker crashed.", hint="Try again."))
    done = a_round(answered(Q8, 25.0), failed)
    figures = figures_of([done])
    assert figures.rows["tok_s"].b is None and compare.verdict(figures.verdict, NAMES) == ""
    assert compare.rows(figures, NAMES)[1] == ("decode", "25.00 tok/s", "n/a", "")
    assert compare.failures(done, NAMES) == ["Q4_K_M: The worker crashed. Try again."]
    idle = [msgspec.structs.replace(one, peak_read=300e9) for one in (Q8, Q4)]  # bytes are no reason then
    for rate, why in ((48.0, "memory is not what limits it"), (120.0, "bytes allow 1.67×; computing limits Q8_0")):
        text = said(a_round(answered(idle[0], 25.0), answered(idle[1], rate)))  # 1.67× is within what 1.92× may be
        assert text == f"Q4_K_M reads 40 % fewer bytes and is {rate / 25:.2f}× as fast: {why}."
