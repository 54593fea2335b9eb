"""Tests requests that are wrong, too large, unsupported, or from a web page: each gets a clear error."""

from __future__ import annotations

from typing import Any

import pytest

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
    "body", [b"", b"{", b'{"messages": [}', b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000, b'"text"', b"null"]
)
def test_a_body_that_is_no_request(tiny: Server, body: bytes) -> None:
    error(tiny.http.post(CHAT, content=body))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": "Hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -2}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -7}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": -5}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"stop": ["x" * 2000]}, "stop"),
        ({"stop": [str(n) for n in range(50)]}, "stop"),
        ({"stop": 7}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"n": 9}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs"),
        ({"logit_bias": {"x": 5}}, "logit_bias"),
        ({"functions": [{"name": "look"}]}, "functions"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": ["look"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"reasoning_effort": "bogus"}, "reasoning_effort"),
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
        ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs"),
        ({"reasoning_budget_tokens": -2}, "reasoning_budget_tokens"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"grammar": f'root ::= "a"{{{"9" * 5000}}}'}, "grammar"),
        ({"grammar": "root ::= [z-a]"}, "grammar"),
        ({"json_schema": {"type": "string", "pattern": "[z-a]"}}, "json_schema"),
        ({"json_schema": {"type": "string", "pattern": f"x{{{'9' * 5000}}}"}}, "json_schema"),
        ({"json_schema": {"type": "integer", "minimum": 10**400}}, "json_schema"),
        ({"repeat_penalty": 1e-300}, "repeat_penalty"),
    ],
)
def test_a_wrong_or_unsupported_field_is_named(tiny: Server, more: dict, param: str) -> None:
    assert error(tiny.post(chat("Hello", **more)))["param"] == param


def test_a_grammar_that_no_token_can_meet_is_the_request_s_fault(tiny: Server) -> None:
    assert error(tiny.post(chat("Hello", grammar="root ::= [\\UFFFFFFFF]")))["code"] == "invalid_grammar"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "logprobs": 30}, "logprobs"),
    ],
)
def test_a_wrong_plain_completion_is_refused(tiny: Server, body: dict, param: str | None) -> None:
    assert error(tiny.post(body, PLAIN))["param"] == param


@pytest.mark.parametrize(
    "more",
    [
        {"top_k": 10**30},
        {"top_k": -1},
        {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "user": "me", "store": True},
        {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}, "reasoning_budget_tokens": -1},
        {"temperature": None, "stop": None, "stream_options": None, "max_tokens": 4},
    ],
)
def test_unusual_but_right_fields_are_accepted(tiny: Server, more: dict) -> None:
    assert tiny.post(chat("Hello", **more)).status_code == 200


@pytest.mark.parametrize("logprobs", [None, False, True, 0, 20])
def test_a_plain_completion_takes_a_number_of_log_probabilities_or_none(tiny: Server, logprobs: object) -> None:
    (choice,) = tiny.post({"prompt": "x", "max_tokens": 2, "logprobs": logprobs}, PLAIN).json()["choices"]
    assert (choice["logprobs"] is None) == (logprobs is None or logprobs is False)


@pytest.mark.parametrize("limit", [-1, 10**30])
def test_an_answer_without_a_limit_ends_at_a_stop_string(tiny: Server, limit: int) -> None:
    text = tiny.post(chat("Hello")).json()["choices"][0]["message"]["content"]
    choice = tiny.post(chat("Hello", max_tokens=limit, stop=[text[4], ""])).json()["choices"][0]
    assert choice["message"]["content"] == text[: text.index(text[4])]
    assert choice["finish_reason"] == "stop"


def test_text_of_any_kind_is_answered_or_refused(tiny: Server) -> None:
    for text in ("\\u0000", "\\ud83d\\ude00", "<|im_end|>", "\\u202e"):
        body = f'{{"messages": [{{"role": "user", "content": "{text}"}}], "max_tokens": 2}}'
        assert tiny.http.post(CHAT, content=body.encode()).status_code == 200
    half = b'{"messages": [{"role": "user", "content": "\\ud83d"}], "max_tokens": 2}'
    error(tiny.http.post(CHAT, content=half))


def test_a_huge_body_is_refused_by_its_length(tiny: Server) -> None:
    assert error(tiny.http.post(CHAT, content=b" " * (4 << 20)), 413)["code"] == "body_too_large"
    chunks = (b" " * (1 << 16) for _ in range(64))  # without a Content-Length
    assert error(tiny.http.post(CHAT, content=chunks), 413)["code"] == "body_too_large"
    assert tiny.post(chat("Hello")).status_code == 200


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(tiny: Server) -> None:
    found = error(tiny.post({"prompt": "x" * 300_000}, PLAIN))
    assert found["code"] == "context_length_exceeded"
    assert found["n_ctx"] == 4096


def test_more_messages_than_the_context_has_tokens_are_refused_before_they_are_tokenized(tiny: Server) -> None:
    found = error(tiny.post({"messages": [{"role": "user", "content": ""}] * 4097}))
    assert (found["code"], found["param"], found["n_ctx"]) == ("context_length_exceeded", "messages", 4096)
    assert "4,097 messages" in found["message"]


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


def test_unknown_paths_and_methods(tiny: Server) -> None:
    assert error(tiny.http.get("/v2/models"), 404)["code"] == "not_found"
    error(tiny.http.get(CHAT), 405)


@pytest.mark.parametrize(
    "path",
    ["/chat/completions", "//v1//chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/",
     "/v1//responses", "/messages", "/v1/v1/messages", "/v1/messages/count_tokens/", "/responses"],
)  # fmt: skip
def test_other_base_addresses_are_answered_too(tiny: Server, path: str) -> None:
    more = {"input": "Hi", "max_output_tokens": 1} if "responses" in path else chat("Hi", max_tokens=1)
    answer = tiny.post({**more, "model": "any"}, path)
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", "tiny-F32") == "tiny-F32"


@pytest.mark.parametrize("path", ["/models", "/v1/models/", "//v1/models", "/v1/v1/models/tiny-F32", "/health/"])
def test_other_base_addresses_of_pages(tiny: Server, path: str) -> None:
    assert tiny.http.get(path).status_code == 200


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/api/chat", "/v1/chat/completions"),
        ("/api/generate", "/v1/completions"),
        ("/v1/embeddings", "llama-server --embeddings"),
        ("/api/v0/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/gpt-4o/chat/completions", "/v1/chat/completions"),
        ("/anthropic/v1/messages", "/v1/messages"),
        ("/v1", "ends with /v1"),
    ],
)
def test_a_wrong_path_is_told_the_right_one(tiny: Server, path: str, right: str) -> None:
    assert right in error(tiny.post(chat("Hi"), path), 404)["message"]


def test_web_pages_and_other_names_may_not_use_it(tiny: Server) -> None:
    body = chat("Hello")
    assert error(tiny.http.post(CHAT, json=body, headers={"origin": "https://evil.example"}), 403)
    assert error(tiny.http.post(CHAT, json=body, headers={"host": "evil.example:8080"}), 403)
    assert error(tiny.http.get("/v1/models", headers={"host": "127.0.0.1.evil.example"}), 403)
    names = (
        "[127.0.0.1]evil.com",
        "[::1]evil.com:80",
        "127.0.0.1%25eth0.evil.com",
        "[::1%25lo.evil.com]",
        "::1",
        "[::1",
    )
    for name in (*names, "127.0.0.1:80:80", "evil.com@127.0.0.1", "127.0.0.1:80@evil.com", "[localhost.evil.com", ""):
        assert tiny.http.get("/v1/models", headers={"host": name}).status_code == 403, name
    assert "access-control-allow-origin" not in tiny.http.get("/v1/models").headers
    for name in ("localhost:1234", "127.0.0.1", "[::1]:8080"):
        assert tiny.http.get("/v1/models", headers={"host": name}).status_code == 200
