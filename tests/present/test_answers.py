"""Tests figures of an answer in words and as JSON."""

from __future__ import annotations

import json

import msgspec
import pytest

from cpuchat.cli.output import json_line
from cpuchat.present.answers import full_summary, roofline_json, summary, timings_json
from cpuchat.protocol.messages import Sampling
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.protocol.timings import DrafterCount, SpeculationFigures, Timings
from cpuchat.telemetry.roofline import after_answer
from tests.support.costs import work_of_size

FULL = Timings(
    cache_n=1024, prompt_n=512, prompt_ms=1954.2, predicted_n=412, predicted_ms=9951.6, ttft_ms=210.0, seed=7
)


@pytest.mark.parametrize(
    ("timings", "reason", "text"),
    [
        (FULL, "end", "412 tokens · 41.3 tok/s · first token 0.21 s · prompt 262 tok/s (512 new, 1,024 cached)"),
        (Timings(predicted_n=1, prompt_n=0, cache_n=5, ttft_ms=3.0), "max_tokens",
         "1 token · first token 3 ms · prompt 0 new, 5 cached · token limit reached"),
        (Timings(predicted_n=1, ttft_ms=7160.0, queue_ms=5000.0, cache_n=5), "end",
         "1 token · first token 7.16 s (5.00 s queued) · prompt 0 new, 5 cached"),
        (Timings(prompt_n=12, prompt_ms=40.0), "cancelled", "0 tokens · prompt 300 tok/s (12 new, 0 cached) · stopped"),
    ],
)  # fmt: skip
def test_the_summary_has_every_figure_with_its_unit(timings: Timings, reason: str, text: str) -> None:
    assert full_summary(timings, reason) == text


def test_reused_tokens_that_a_server_does_not_report_are_not_zero() -> None:
    served = Timings(prompt_n=2000, prompt_ms=3.0, predicted_n=1, ttft_ms=9.0, reused_known=False)
    assert full_summary(served, "end") == "1 token · first token 9 ms · prompt 2,000 tokens"
    fields = timings_json(msgspec.structs.replace(served, prompt_ms=0.0))
    assert fields["cache_n"] is fields["prompt_ms"] is fields["prompt_per_second"] is None
    counted = SpeculationFigures(passes=2, draft_n=4, draft_n_accepted=2, source="server")
    drafted = timings_json(msgspec.structs.replace(served, speculation=counted))["speculation"]
    assert not {"draft_passes", "draft_ms", "depth"} & set(drafted)
    waited = msgspec.structs.replace(served, ttft_ms=500.0, draft_n=4, draft_n_accepted=2, speculation=counted)
    assert summary(waited, "end") == "1 token · first token 0.50 s"
    assert "50 % of 4 drafted accepted" in full_summary(waited, "end")


def test_the_line_under_an_answer_has_its_speed_and_why_it_ended() -> None:
    assert summary(FULL, "end") == "412 tokens · 41.3 tok/s · first token 0.21 s"
    assert summary(DRAFTED, "cancelled") == "412 tokens · 41.3 tok/s · 1.42× vs plain · first token 0.21 s · stopped"
    assert summary(None, "worker_died") == "worker crashed"
    chosen = Sampling(temperature=0.0, top_p=0.9, seed=7)
    assert summary(FULL, "end", Sampling()) == summary(FULL, "end")
    assert summary(FULL, "cancelled", chosen).endswith("0.21 s · temperature 0 · top-p 0.9 · seed 7 · stopped")
    greedy = Sampling(temperature=0.0)
    assert summary(FULL, "end", greedy, greedy) == summary(FULL, "end")  # as recommended for the model
    assert "temperature 0.7" in summary(FULL, "end", Sampling(), greedy)
    assert summary(FULL, "end", Sampling(repeat_last_n=9)) == summary(FULL, "end")  # a window of no penalty
    assert "repeat-last-n 9" in summary(FULL, "end", Sampling(repeat_last_n=9, presence_penalty=0.5))


DRAFTED = msgspec.structs.replace(
    FULL,
    draft_n=410,
    draft_n_accepted=295,
    speculation=SpeculationFigures(
        passes=133,
        draft_n=410,
        draft_n_accepted=295,
        by_position=((133, 110), (110, 90)),
        by_drafter=(
            DrafterCount(name="draft", draft_n=400, draft_n_accepted=290),
            DrafterCount(name="suffix", draft_n=10, draft_n_accepted=5),
        ),
        drafter="draft",
        depth=4,
        draft_ms=1200.0,
        plain_ms=34.4,
    ),
)


def off(reason: DraftsOff | None) -> Timings:
    return msgspec.structs.replace(FULL, speculation=SpeculationFigures(passes=412, off=reason))


def test_no_speed_up_is_told_beside_other_programs() -> None:
    figures = DRAFTED.speculation
    assert figures is not None
    disturbed = msgspec.structs.replace(figures, plain_ms=None, disturbed=True)
    timings = msgspec.structs.replace(DRAFTED, speculation=disturbed)
    assert " · 41.3 tok/s · first token" in summary(timings, "end")
    assert "(3.1 per pass)" in full_summary(timings, "end")
    for joined in (DRAFTED.followed_by(timings), timings.followed_by(DRAFTED)):
        assert joined.speed_up is None and joined.speculation is not None and joined.speculation.disturbed


@pytest.mark.parametrize(
    ("figures", "end"),
    [
        (DRAFTED.speculation, "72 % of 410 drafted accepted (3.1 per pass, 1.42× vs plain)"),
        (SpeculationFigures(passes=133, draft_n=410), "72 % of 410 drafted accepted (3.1 per pass)"),
        (None, "72 % of 410 drafted accepted"),
        (SpeculationFigures(off=DraftsOff("rare repeats")), "72 % of 410 drafted accepted"),
    ],
)
def test_the_summary_tells_how_drafting_went(figures: SpeculationFigures | None, end: str) -> None:
    assert full_summary(msgspec.structs.replace(DRAFTED, speculation=figures), "end").endswith(f" · {end}")


def test_the_summary_tells_why_nothing_was_drafted() -> None:
    text = full_summary(off(DraftsOff("low acceptance", acceptance=0.31, slower_share=0.12)), "end")
    assert text.endswith(" · drafts off: at 31 % acceptance plain decoding is 12 % faster on these cores")
    text = full_summary(off(DraftsOff("low acceptance", acceptance=0.19, slower_share=None)), "end")
    assert text.endswith(" · drafts off: at 19 % acceptance plain decoding is faster on these cores")  # times: no basis
    assert "drafts" not in full_summary(off(None), "end")


def test_json_has_llama_servers_names_and_everything_about_drafting() -> None:
    fields = json.loads(json_line(timings_json(DRAFTED)))
    assert fields["predicted_per_second"] == pytest.approx(411 / 9.9516)  # the first token is of the prompt
    assert fields["prompt_per_token_ms"] == pytest.approx(1954.2 / 512)
    assert (fields["draft_n"], fields["draft_n_accepted"]) == (410, 295)
    drafting = fields["speculation"]
    assert drafting["tokens_per_pass"] == pytest.approx(411 / 133)
    assert drafting["speed_up"] == pytest.approx(411 / 9951.6 * 34.4)
    assert drafting["by_position"][1] == {"draft_n": 110, "draft_n_accepted": 90}
    assert drafting["drafters"][1] == {"name": "suffix", "draft_n": 10, "draft_n_accepted": 5}
    assert drafting["reason"] == ""
    idle = timings_json(off(DraftsOff("rare repeats")))
    assert idle["speculation"]["reason"] == "repeated n-grams rarely continue the same way in this text"
    assert "draft_n" not in idle and "speculation" not in timings_json(FULL)


MODEL = ModelInfo(
    path="m.gguf", name="m", architecture="llama", quantization="Q8_0", n_params=1, size=1, n_ctx=8192,
    n_ctx_train=8192, n_vocab=1, n_layer=1, n_threads=2, cpus=(0, 1), peak_read=51e9, cache_bytes=32 << 20,
    work=work_of_size(1_000_000_000),
)  # fmt: skip


def test_the_summary_has_the_bandwidth_where_there_is_a_peak() -> None:
    text = full_summary(FULL, "end", after_answer(MODEL, FULL))
    assert text.endswith(" · 41 of 51 GB/s (81 %)")  # 41.3 tok/s x 1 GB
    unmeasured = msgspec.structs.replace(MODEL, peak_read=0.0)
    assert "GB/s" not in full_summary(FULL, "end", after_answer(unmeasured, FULL))
    small = msgspec.structs.replace(MODEL, work=work_of_size(8_000_000))
    assert full_summary(FULL, "end", after_answer(small, FULL)).endswith(" · weights fit in L3: no limit")
    slow = msgspec.structs.replace(MODEL, peak_read=20e9)
    assert full_summary(FULL, "end", after_answer(slow, FULL)).endswith(" · 41 of 41 GB/s (100 %)")


def test_json_carries_the_bandwidth_and_what_it_is_held_against() -> None:
    found = json.loads(json_line(roofline_json(after_answer(MODEL, FULL))))
    assert found["bandwidth"] == pytest.approx(1e9 * 411 / 9.9516)
    assert found["source"] == "estimated"  # as the panel and docs/figures.md say
    assert found["utilization"] == pytest.approx(found["bandwidth"] / 51e9)
    assert (found["peak"], found["peak_source"], found["bytes_per_pass"]) == (51e9, "measured, 2 cores", 1e9)
    assert found["ceilings"]["no_draft"] == pytest.approx(51)
    assert found["ceilings"]["this_acceptance"] is None
    assert found["limit"] == "memory"
    unmeasured = roofline_json(after_answer(msgspec.structs.replace(MODEL, peak_read=0.0), FULL))
    assert unmeasured["utilization"] is None
    assert unmeasured["note"] == "no peak · run cpuchat probe"


def test_what_other_programs_took_is_said_with_the_speed() -> None:
    busy = msgspec.structs.replace(FULL, cpu_wait=0.66, cpu_ran=0.12)
    said = "412 tokens · 41.3 tok/s · cores 12 % yours · other programs have the rest · first token 0.21 s"
    assert summary(busy, "end") == said and full_summary(busy, "end").startswith(said)
    short = msgspec.structs.replace(busy, predicted_n=33, predicted_ms=18.0)  # a system's own programs take as much
    assert "yours" not in summary(short, "end")
