"""Tests agents whose server was restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.test_tools import TOOLS
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
