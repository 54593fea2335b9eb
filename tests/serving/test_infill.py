"""Tests /infill with the requests that llama.vim and llama.vscode send, and the suffix of plain completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.edited_gguf import filling
from tests.support.serving import Server, server

BEFORE, AFTER = "def area(width, height):\n", "\nprint(area(2, 3))\n"
CHUNKS = [
    {"text": "def volume(a, b, c):\n    return a * b * c\n", "time": [3, 14], "filename": "solids.py"},
    {"text": "import math\n", "time": [3, 15], "filename": "more.py"},
]
SHOWN = [
    "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms", "timings/prompt_per_second",
    "timings/predicted_n", "timings/predicted_ms", "timings/predicted_per_token_ms", "timings/predicted_per_second",
    "truncated", "tokens_cached",
]  # fmt: skip
CODE = {
    "input_prefix": BEFORE, "input_suffix": AFTER, "input_extra": CHUNKS, "prompt": "    return", "n_predict": 8,
    "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True,
    "n_indent": 4, "t_max_prompt_ms": 500, "t_max_predict_ms": 2500,
}  # fmt: skip
VIM = CODE | {"stop": [], "n_indent": 0, "top_p": 0.90, "t_max_predict_ms": 1000, "response_fields": SHOWN}
VIM_AHEAD = VIM | {
    "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "temperature": 0.0, "samplers": [],
    "t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""],
}  # fmt: skip


@pytest.fixture(scope="module")
def filler(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    with server(filling(tiny_model, folder / "filler-F32.gguf"), folder) as running:
        yield running


def test_llama_vim_gets_the_fields_that_it_asks_for(filler: Server) -> None:
    response = filler.http.post("/infill", json=VIM, headers={"authorization": "Bearer"})  # without a key
    assert response.status_code == 200, response.text
    found = response.json()
    assert list(found) == SHOWN
    assert found["content"] and found["timings/predicted_n"] == 8 and found["truncated"] is False
    assert found["tokens_cached"] >= found["timings/prompt_n"] > 0


def test_what_is_evaluated_ahead_is_reused(filler: Server) -> None:
    extra = [{**CHUNKS[0], "text": "x = 1\n" * 40}]
    ahead = filler.post({**VIM_AHEAD, "input_extra": extra}, "/infill")
    assert ahead.status_code == 200 and ahead.json() == {}
    asked = {**CODE, "input_extra": extra}
    timings = filler.post(asked, "/infill").json()["timings"]
    assert timings["cache_n"] > 200 > timings["prompt_n"]


def test_llama_vscode_gets_all_and_the_same_again(filler: Server) -> None:
    first, second = (filler.post(CODE, path).json() for path in ("/infill", "/v1/infill"))
    assert first["content"] == second["content"] != ""  # greedy
    assert first["stop"] is True and first["stop_type"] == "limit" and first["stopping_word"] == ""
    assert first["tokens_predicted"] == 8 and second["timings"]["prompt_n"] <= 1 < first["tokens_evaluated"]


def test_a_stop_string_is_told(filler: Server) -> None:
    text = filler.post(CODE, "/infill").json()["content"]
    found = filler.post({**CODE, "stop": [text[3]]}, "/infill").json()
    assert found["content"] == text[: text.index(text[3])]
    assert (found["stop_type"], found["stopping_word"]) == ("word", text[3])


def test_a_stream_gives_the_same_text(filler: Server) -> None:
    whole = filler.post(CODE, "/infill").json()
    with filler.http.stream("POST", "/infill", json={**CODE, "stream": True}) as response:
        parts = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [part["stop"] for part in parts] == [*[False] * (len(parts) - 1), True]
    assert parts[-1]["timings"]["predicted_n"] == 8


def test_a_plain_completion_with_a_suffix_fills_in(filler: Server) -> None:
    asked = {"model": "", "prompt": BEFORE, "max_tokens": 8, "temperature": 0}
    answers = [filler.openai.completions.create(suffix=suffix, **asked) for suffix in (AFTER, None)]
    filled, plain = (answer.usage.prompt_tokens for answer in answers if answer.usage is not None)
    assert filled > plain + len(AFTER) - 5  # a merge makes one token of two letters
    assert answers[0].choices[0].text


def test_a_model_without_the_tokens_is_refused(tiny: Server) -> None:
    refused = tiny.post(CODE, "/infill")
    error = refused.json()["error"]
    assert refused.status_code == 501 and error["type"] == "not_supported_error" and error["code"] == "unsupported"
    assert "tiny-F32 cannot fill in" in error["message"] and "Qwen2.5 Coder" in error["message"]
    other = tiny.post({"prompt": "a", "suffix": "b"}, "/v1/completions")
    assert other.status_code == 400 and other.json()["error"]["param"] == "suffix"
    assert tiny.post({"prompt": "a", "suffix": "", "max_tokens": 1}, "/v1/completions").status_code == 200
    assert tiny.metric("requests_total", endpoint="infill", result="refused") == 1


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input_suffix": None}, "input_suffix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0]"),
        ({"n_predict": -2}, "max_tokens"),
        ({"n_indent": -1}, "n_indent"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
    ],
)
def test_a_wrong_field_is_named(filler: Server, more: dict, param: str) -> None:
    response = filler.post({**CODE, **more}, "/infill")
    assert response.status_code == 400
    error = response.json()["error"]
    assert param in f"{error['param']} {error['message']}"
