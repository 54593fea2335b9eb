"""Tests what is sent of an answer, and what is known of one that a client cuts: the engine's own timings are not."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.protocol.messages import PrefillProgress, SpeculationUpdate, TextDelta
from cpuchat.serving.metrics import ServingMetrics
from cpuchat.serving.openai_chat import ChatReply
from cpuchat.serving.replies import ReplyProgress
from cpuchat.telemetry.meter import Meter
from tests.serving.test_metrics import samples
from tests.serving.test_service import parsed
from tests.support.scripted_backend import DRAFTING


def cut(*, drafting: bool) -> ReplyProgress:
    progress = ReplyProgress()
    progress.follow(PrefillProgress(request_id=1, processed=40, total=40, cache_n=8), 10.0)
    progress.follow(TextDelta(request_id=1, text="a", n_tokens=1, predicted_n=1, at_ms=700.0), 11.0)
    if drafting:
        progress.follow(SpeculationUpdate(request_id=1, predicted_n=413, figures=DRAFTING), 12.0)
    progress.follow(TextDelta(request_id=1, text="b", n_tokens=419, predicted_n=420, at_ms=9000.0), 13.0)
    return progress


@pytest.mark.parametrize("drafting", [False, True])
def test_a_cut_answer_is_counted_as_far_as_its_events_tell(drafting: bool) -> None:
    metrics, progress = ServingMetrics(), cut(drafting=drafting)
    metrics.count_answer(progress.timings, None)
    found = samples(metrics, Meter())
    assert found["predicted_tokens_total"] == 420 and found["decode_steps_total"] == 419
    assert found["passes_total"] == (DRAFTING.passes if drafting else 419)
    assert found["draft_tokens_total"] == (DRAFTING.draft_n if drafting else 0)


def test_reasoning_is_separate_in_chats() -> None:
    reply = ChatReply("m", "f", parsed())
    thought = TextDelta(request_id=1, text="Hm.", channel="reasoning", n_tokens=2, predicted_n=2)
    said = TextDelta(request_id=1, text="Yes.", n_tokens=1, predicted_n=3)
    chunks = []
    for event in (thought, said):
        reply.progress.follow(event, 1.0)
        chunks.append(msgspec.json.decode((reply.rendered(event) or b"").removeprefix(b"data: ")))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "reasoning_content": "Hm."}, {"content": "Yes."}]
    whole = msgspec.json.decode(reply.whole())
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
