"""Tests prompts that are evaluated ahead, and agents whose server was restarted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.serving.test_tools import OWN, TOOLS
from tests.support.serving import Server, chat, server

SYSTEM = "You are careful. " * 40


def reused(running: Server, text: str) -> tuple[int, int]:
    """Return the tokens of a prompt that were reused and evaluated."""
    talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    timings = running.post(chat("", messages=talk, tools=TOOLS)).json()["timings"]
    return timings["cache_n"], timings["prompt_n"]


@pytest.mark.timeout(300)
def test_an_agent_costs_what_is_new_after_a_restart(tiny_model: Path, tmp_path: Path, bandwidth_file: bytes) -> None:
    with server(tiny_model, tmp_path, bandwidth=bandwidth_file) as first:
        assert reused(first, "Hello")[1] > 1000
    with server(tiny_model, tmp_path, bandwidth=bandwidth_file) as again:
        cached, evaluated = reused(again, "Another question")
        assert cached > 1000
        assert evaluated < 90
        assert again.http.get("/metrics").status_code == 200


@pytest.mark.timeout(300)
def test_a_prompt_is_evaluated_ahead(tiny_model: Path, tmp_path: Path, bandwidth_file: bytes) -> None:
    body = {"system": SYSTEM, "tools": OWN, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 500}
    for name, content in (("agent", body), ("wrong", {"messages": []})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "served").mkdir()
    files = (argument for name in ("agent", "wrong") for argument in ("--warm", str(tmp_path / f"{name}.json")))
    with server(tiny_model, tmp_path / "served", *files, bandwidth=bandwidth_file) as running:
        asked = {**body, "messages": [{"role": "user", "content": "Something else"}], "max_tokens": 4}
        usage = running.post(asked, "/v1/messages").json()["usage"]
        assert usage["cache_read_input_tokens"] > 500
        assert usage["input_tokens"] < 90
    assert "`messages` is empty" in (tmp_path / "served" / "stderr.txt").read_text()
