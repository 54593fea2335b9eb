"""Tests the server with OpenAI's own client: streams, figures, conversations."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.cli.program import HANG_GUARD
from tests.support.serving import Server, chat

PARTS = ("n", "ms", "per_token_ms", "per_second")
TIMINGS = {"cache_n", *(f"{kind}_{part}" for kind in ("prompt", "predicted") for part in PARTS)}
"""Those of llama-server (server_slot_stats::to_json) without drafts."""


def events(tiny: Server, body: dict, path: str = "/v1/chat/completions") -> list[dict]:
    """Return the events of a stream, as sent; the last one is `[DONE]`."""
    with tiny.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_answer_has_text_usage_and_timings(tiny: Server) -> None:
    answer = tiny.openai.chat.completions.create(model="", **chat("Hello"))
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16
    timings = answer.model_extra["timings"] if answer.model_extra else {}
    assert set(timings) == TIMINGS
    assert timings["predicted_n"] == 16
    assert timings["predicted_per_second"] == pytest.approx(15e3 / timings["predicted_ms"])
    assert timings["cache_n"] + timings["prompt_n"] == answer.usage.prompt_tokens


def test_a_stream_gives_the_same_text_with_usage_and_timings_at_its_end(tiny: Server) -> None:
    whole = tiny.openai.chat.completions.create(model="", **chat("Hello"))
    stream = tiny.openai.chat.completions.create(
        model="", stream=True, stream_options={"include_usage": True}, **chat("Hello")
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    last = chunks[-1]
    assert not last.choices
    assert last.usage is not None
    assert last.usage.completion_tokens == 16
    assert set((last.model_extra or {})["timings"]) == TIMINGS


def test_every_chunk_has_timings_and_progress_when_asked(tiny: Server) -> None:
    plain = events(tiny, chat("Hello"))
    assert ["timings" in event for event in plain] == [*[False] * (len(plain) - 1), True]
    assert not any("usage" in event for event in plain)
    told = events(tiny, chat("Tell me more " * 100, timings_per_token=True, return_progress=True))
    progress = [event["prompt_progress"] for event in told if "prompt_progress" in event]
    assert progress[-1]["processed"] == progress[-1]["total"] > 100
    assert set(progress[0]) == {"total", "cache", "processed", "time_ms"}
    counts = [event["timings"]["predicted_n"] for event in told if "timings" in event]
    assert len(counts) == len(told)
    assert counts == sorted(counts)
    assert counts[-1] == 16
    parts = [event["timings"][name] for event in told for name in ("cache_n", "prompt_n", "predicted_n")]
    assert 0 in parts and all(isinstance(part, int) for part in parts)
    assert told[-1]["timings"]["prompt_n"] + told[-1]["timings"]["cache_n"] == progress[-1]["total"]


def test_plain_completions_answer_whole_and_streamed(tiny: Server) -> None:
    asked = {"model": "", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    whole = tiny.openai.completions.create(**asked)
    assert whole.object == "text_completion"
    assert whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    chunks = list(tiny.openai.completions.create(stream=True, **asked))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_several_answers_have_one_response(tiny: Server) -> None:
    asked = {**chat("Hello"), "temperature": 1.0, "seed": 3}
    one = tiny.openai.chat.completions.create(model="", **asked)
    answer = tiny.openai.chat.completions.create(model="", n=3, **asked)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert texts[0] == one.choices[0].message.content  # each has a seed of its own, the first the request's
    assert answer.usage is not None and one.usage is not None
    assert answer.usage.completion_tokens == 48 and answer.usage.prompt_tokens == one.usage.prompt_tokens
    parts: dict[int, str] = {}
    stream = tiny.openai.chat.completions.create(model="", n=3, stream=True, **asked)
    chunks = list(stream)
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        parts[choice.index] = parts.get(choice.index, "") + (choice.delta.content or "")
    assert [parts[index] for index in range(3)] == texts
    assert len({chunk.id for chunk in chunks}) == 1
    plain = tiny.openai.completions.create(model="", prompt="Once", n=2, max_tokens=4)
    assert [choice.index for choice in plain.choices] == [0, 1]


def test_the_model_is_listed_and_answers_to_its_names(tiny: Server) -> None:
    (model,) = tiny.openai.models.list()
    assert model.id == "tiny-F32"
    assert model.owned_by == "cpuchat"
    assert tiny.openai.models.retrieve("tiny-F32.gguf").id == model.id
    for name in ("tiny-F32", "tiny-F32.gguf", "tiny"):
        assert tiny.openai.chat.completions.create(model=name, **chat("Hello")).model == "tiny-F32"


def test_a_model_that_is_not_served_is_answered_by_the_one_that_is_and_noted_once(tiny: Server) -> None:
    import openai  # slow

    for name in ("gpt-4", "claude-haiku-4-5"):
        assert tiny.openai.chat.completions.create(model=name, **chat("Hello")).model == "tiny-F32"
    assert (tiny.folder / "stderr.txt").read_text().count("tiny-F32 answers requests for models") == 1
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        tiny.openai.models.retrieve("gpt-4")


def test_an_answer_has_the_form_that_is_asked_for(tiny: Server) -> None:
    schema = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = tiny.openai.chat.completions.create(model="", response_format=form, **{**chat("Hi"), "max_tokens": 40})
    assert json.loads(answer.choices[0].message.content or "")["answer"] in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"
    grammar = {"prompt": "Hi", "grammar": 'root ::= "left" | "right"', "max_tokens": 40}
    assert tiny.post(grammar, "/v1/completions").json()["choices"][0]["text"] in ("left", "right")


def test_conversations_in_turn_keep_their_prefix_caches(tiny: Server) -> None:
    talks = [[{"role": "user", "content": f"{number} is my number. " * 30}] for number in ("One", "Two", "Three")]
    lengths = []
    for talk in talks:
        answer = tiny.post(chat("", messages=talk)).json()
        talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        talk.append({"role": "user", "content": "Which one?"})
        lengths.append(answer["usage"]["total_tokens"])
    for talk, length in zip(talks, lengths, strict=True):
        usage = tiny.post(chat("", messages=talk)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= length - 1


def test_nobody_learns_from_the_cache_what_others_asked(tiny: Server) -> None:
    body = chat("My password is swordfish. " * 10)

    def cached(http: httpx.Client, **more: object) -> int:
        usage = http.post("/v1/chat/completions", json={**body, **more}).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    transport = httpx.HTTPTransport(local_address="127.0.0.2")  # as from another machine
    with httpx.Client(base_url=tiny.url, transport=transport, timeout=HANG_GUARD) as other:
        cached(tiny.http)
        assert cached(other) == cached(tiny.http, cache_salt="mine") == cached(tiny.http, cache_salt="theirs") == 0
        for again in (cached(tiny.http), cached(other), cached(tiny.http, cache_salt="mine")):
            assert again > 30  # its own


def test_what_does_not_fit_is_refused_and_nothing_is_left_out(tiny: Server) -> None:
    import openai  # slow

    long = [{"role": "user", "content": "word " * 1500}, {"role": "assistant", "content": "yes"}] * 3
    with pytest.raises(openai.BadRequestError) as raised:
        tiny.openai.chat.completions.create(
            model="", **{**chat(""), "messages": [*long, {"role": "user", "content": "Hello"}]}
        )
    assert raised.value.code == "context_length_exceeded"
    assert "4,096" in raised.value.message
    body = raised.value.body
    assert isinstance(body, dict)
    assert body["type"] == "exceed_context_size_error"  # as llama-server tells
    assert body["n_prompt_tokens"] > body["n_ctx"] == 4096
    assert tiny.post(chat("word " * 9000, stream=True)).json()["error"]["code"] == "context_length_exceeded"
    assert tiny.post(chat("Hello")).status_code == 200


def test_metrics_count_requests_tokens_and_speed(tiny: Server) -> None:
    before = tiny.metric("predicted_tokens_total") or 0
    tiny.post({"prompt": "Hello", "max_tokens": 7}, "/v1/completions")
    assert tiny.metric("predicted_tokens_total") == before + 7
    assert tiny.metric("requests_running") == tiny.metric("requests_waiting") == 0
    assert (tiny.metric("predicted_seconds_total") or 0) > 0
    assert tiny.metric("model_loads_total") == 1
    page = tiny.http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in page.text.splitlines():
        assert line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith("cpuchat_"), line
