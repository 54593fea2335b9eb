"""Tests what is said of a prompt's reused tokens, and of states that are kept."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cpuchat.present.answers import (
    brief_reasons,
    full_summary,
    kept_states,
    note,
    prefill_progress,
    reasons,
    restored,
    summary,
    timings_json,
)
from cpuchat.protocol.messages import PrefillProgress
from cpuchat.protocol.timings import Reuse, Timings
from tests.support.meter_states import EDITED, MODEL

FULL = Timings(cache_n=3102, prompt_n=38, prompt_ms=145.0, predicted_n=412, predicted_ms=9951.6, ttft_ms=210.0)
KEPT = "this chat's KV cache of 3.2 GB is larger than engine.saved_kv_gb (2 GB) and is not kept"


def progress(reuse: Reuse | None, cache_n: int = 3102) -> str:
    event = PrefillProgress(request_id=1, processed=3110, total=3140, cache_n=cache_n, reuse=reuse)
    return prefill_progress(event, left_s=6).removeprefix("reading the prompt · 3,110 of 3,140 tokens")


@pytest.mark.parametrize(
    ("changed", "words", "brief"),
    [
        ({"changed": "system"}, "the system prompt changed", "system prompt changed"),
        ({"changed": "trimmed"}, "the oldest messages were left out", "old messages left out"),
        ({"changed": "message", "message": 2}, "message 2 was edited", "message 2 was edited"),
        ({"changed": "template", "message": 2}, "the template changed message 2", "message 2 re-rendered"),
    ],
)
def test_why_not_more_was_reused(changed: dict[str, Any], words: str, brief: str) -> None:
    reuse = Reuse(**changed)
    assert reasons(reuse) == [f"re-evaluated: {words}"]
    assert brief_reasons(reuse) == [brief]
    assert len(brief) <= 28  # the columns of the panel


def test_tokens_without_a_checkpoint_near_them_are_a_reason() -> None:
    assert reasons(Reuse(again=210)) == ["no checkpoint nearer: 210 tokens re-evaluated"]
    assert brief_reasons(Reuse(again=1)) == ["1 token re-evaluated"]


def test_a_prompt_that_goes_on_has_no_reason_and_the_prefill_line_has_the_main_one() -> None:
    assert (reasons(Reuse()), brief_reasons(Reuse()), restored(Reuse(ms=3.0))) == ([], [], "")
    assert progress(Reuse()) == progress(None) == ", 3,102 cached · 6 s left"
    assert progress(EDITED) == ", 3,102 from disk · 6 s left · message 2 was edited"
    assert progress(Reuse(again=210)) == ", 3,102 cached · 6 s left · 210 tokens re-evaluated"
    assert progress(Reuse(changed="system"), cache_n=0) == " · 6 s left · system prompt changed"


def test_the_full_summary_and_json_say_all_and_the_line_under_an_answer_nothing() -> None:
    timings = msgspec.structs.replace(FULL, reuse=EDITED)
    assert full_summary(timings, "cancelled").endswith(
        "(38 new, 3,102 cached) · restored from disk in 40 ms · re-evaluated: message 2 was edited"
        " · no checkpoint nearer: 210 tokens re-evaluated · stopped"
    )
    assert summary(timings, "end") == summary(FULL, "end")
    fields = timings_json(timings)["reuse"]
    assert fields == {"source": "disk", "ms": 40.0, "changed": "message", "message": 2, "again": 210, "note": ""}
    assert "reuse" not in timings_json(FULL)


def test_what_is_not_kept_is_a_sentence_also_if_the_answer_goes_on_after_a_call() -> None:
    noted = msgspec.structs.replace(FULL, reuse=Reuse(note=KEPT))
    assert note(noted) == f"T{KEPT[1:]}."
    assert note(None) == note(FULL) == note(msgspec.structs.replace(FULL, reuse=EDITED)) == ""
    both = msgspec.structs.replace(FULL, reuse=EDITED).followed_by(noted)
    assert note(both) == note(noted)
    assert both.reuse == msgspec.structs.replace(EDITED, note=KEPT)


def test_what_a_model_may_keep() -> None:
    assert kept_states(None) == kept_states(MODEL) == ""
    whole = msgspec.structs.replace(MODEL, state_memory=1_900_000_000)
    assert kept_states(whole) == "up to 1.9 GB in memory"
    cut = msgspec.structs.replace(whole, partial_state=50_000_000)
    assert kept_states(cut) == "checkpoints 50.0 MB each, up to 1.9 GB in memory"
