"""Tests requests that are wrong, too large, unsupported, or from a web page: each gets a clear error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.test_dialects import refused
from tests.support.serving import Server, chat

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def error(response: Any, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    found = response.json()["error"]
    assert found["message"]
    assert {"message", "type", "param", "code"} <= set(found)
    return found


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": "Hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -7}, "top_k"),
        ({"stop": ["x" * 2000]}, "stop"),
        ({"n": 17}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"65": 5}}, "logit_bias"),
        ({"functions": [{"name": "look"}]}, "functions"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"not": {}}}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "stop": "}"}, "stop"),
        ({"json_schema": {"type": "hexagon"}}, "json_schema"),
        ({"chat_template_kwargs": {"enable_thinking": False, "x": 1}}, "chat_template_kwargs"),
        ({"reasoning_budget_tokens": -2}, "reasoning_budget_tokens"),
        ({"grammar": "root ::= x"}, "grammar"),
    ],
)
def test_a_wrong_or_unsupported_field_is_named(more: dict, param: str) -> None:
    assert refused(CHAT, chat("Hello", **more)).param == param


@pytest.mark.parametrize("more", [{"prompt": ["a", "b"]}, {"prompt": []}, {"echo": True}, {"logprobs": 3}])
def test_a_wrong_plain_completion_is_refused(more: dict) -> None:
    assert refused(PLAIN, {"prompt": "x", **more}).param == next(iter(more))


def test_a_grammar_that_no_token_can_meet_is_the_request_s_fault(tiny: Server) -> None:
    assert error(tiny.post(chat("Hello", grammar="root ::= [\\UFFFFFFFF]")))["code"] == "invalid_grammar"


def test_an_answer_without_a_limit_ends_at_a_stop_string(tiny: Server) -> None:
    text = tiny.post(chat("Hello")).json()["choices"][0]["message"]["content"]
    choice = tiny.post(chat("Hello", max_tokens=-1, stop=[text[4], ""])).json()["choices"][0]
    assert choice["message"]["content"] == text[: text.index(text[4])]
    assert choice["finish_reason"] == "stop"


def test_a_huge_body_is_refused_by_its_length(tiny: Server) -> None:
    assert error(tiny.http.post(CHAT, content=b" " * (4 << 20)), 413)["code"] == "body_too_large"
    chunks = (b" " * (1 << 16) for _ in range(64))  # without a Content-Length
    assert error(tiny.http.post(CHAT, content=chunks), 413)["code"] == "body_too_large"
    assert tiny.post(chat("Hello")).status_code == 200


def test_what_a_client_sent_is_not_in_the_log_and_only_its_beginning_in_the_error(tiny: Server) -> None:
    forged = "forged-name\n12:00:00  127.0.0.1  chat  ok" + "x" * 5000
    for more in (
        {"messages": [{"role": forged, "content": "Hello"}]},
        {"messages": [{"role": "user", "content": [{"type": forged}]}]},
    ):
        response = tiny.post(chat("Hello", **more))
        assert "\\n" not in response.text
        assert len(response.text) < 500
    assert "forged-name" not in (tiny.folder / "stderr.txt").read_text()


def test_what_a_path_takes_is_told(tiny: Server) -> None:
    response = tiny.http.options(CHAT)
    assert error(response, 405)["code"] == "http" and response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path", ["/chat/completions", "//v1//chat/completions", "/v1/v1/messages", "/v1/messages/count_tokens/"]
)
def test_other_base_addresses_are_answered_too(tiny: Server, path: str) -> None:
    answer = tiny.post(chat("Hi", max_tokens=1, model="any"), path)
    assert answer.status_code == 200, answer.text
    for page in ("/models", "/v1/models/", "/v1/v1/models/tiny-F32", "/health/"):
        assert tiny.http.get(page).status_code == 200


@pytest.mark.parametrize(
    ("path", "right"),
    [("/api/chat", "/v1/chat/completions"), ("/v1/embeddings", "llama-server --embeddings"), ("/v1", "/v1/messages")],
)
def test_a_wrong_path_is_told_the_right_one(tiny: Server, path: str, right: str) -> None:
    found = error(tiny.post(chat("Hi"), path), 404)
    assert right in found["message"] and found["code"] == "not_found"


def test_web_pages_and_other_names_may_not_use_it(tiny: Server) -> None:
    body = chat("Hello")
    assert error(tiny.http.post(CHAT, json=body, headers={"origin": "https://evil.example"}), 403)
    assert error(tiny.http.post(CHAT, json=body, headers={"host": "evil.example:8080"}), 403)
    assert error(tiny.http.get("/v1/models", headers={"host": "127.0.0.1.evil.example"}), 403)
    wrong = "[127.0.0.1]evil.com 127.0.0.1%25eth0.evil.com [::1%25lo.evil.com] [::1 127.0.0.1:80:80 evil.com@127.0.0.1"
    for name in (*wrong.split(), ""):
        assert tiny.http.get("/v1/models", headers={"host": name}).status_code == 403, name
    assert "access-control-allow-origin" not in tiny.http.get("/v1/models").headers
    for name in ("localhost:1234", "127.0.0.1", "[::1]:8080"):
        assert tiny.http.get("/v1/models", headers={"host": name}).status_code == 200
