"""Tests drafting from the command line, with the real worker and the demo pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpuchat.config import settings
from tests.cli.program import refused, run, succeeded

pytestmark = pytest.mark.usefixtures("measured_machine", "one_core")

QUESTION = "What is cpuchat?"
DRAFT = "cpuchat-demo-draft-1m-q8_0.gguf"


def demo(*arguments: str, tokens: int = 48) -> dict[str, Any]:
    done = run(
        "ask", "--json", "--model", "demo", "--temperature", "0", "--max-tokens", str(tokens), *arguments, QUESTION
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_fixed_depth_drafts_and_the_text_is_that_of_off_which_loads_no_draft_model() -> None:
    plain = demo("--drafters", "off")
    assert "draft_model" not in plain
    assert "draft_n" not in plain["timings"]
    assert "speculation" not in plain["timings"]
    drafted = demo("--drafters", "draft", "--draft-depth", "3")
    assert drafted["text"] == plain["text"]
    assert drafted["draft_model"]
    figures, drafting = drafted["timings"], drafted["timings"]["speculation"]
    assert 0 < figures["draft_n_accepted"] <= figures["draft_n"]
    assert 1 < drafting["tokens_per_pass"] <= 4
    assert len(drafting["by_position"]) == 3
    assert sum(position["draft_n"] for position in drafting["by_position"]) == figures["draft_n"]
    assert [one["name"] for one in drafting["drafters"]] == ["draft"]


def test_the_demo_model_brings_its_draft_unless_it_is_declined() -> None:
    assert demo(tokens=4)["draft_model"]
    for declined in (("--draft-model", "none"), ("--drafters", "suffix")):
        result = demo(*declined, tokens=4)
        assert "draft_model" not in result and "speculation" in result["timings"]


def test_a_draft_that_cannot_be_used_is_refused_or_left_out_if_it_is_of_the_settings(tiny_model: Path) -> None:
    done = run("ask", "--model", "demo", "--draft-model", str(tiny_model), QUESTION)
    assert done.returncode == 12
    assert done.stdout == ""
    first, second = done.stderr.splitlines()
    assert first.startswith("cpuchat: tiny-F32.gguf cannot draft for cpuchat-demo-8m-q8_0.gguf: ")
    assert "cpuchat models pair" in second
    told = refused(2, "ask", "--model", "demo", "--draft-model", "demo-draft", "--drafters", "suffix", QUESTION)
    assert "--drafters auto" in told
    settings.update({"speculation": {"draft_model": str(tiny_model)}})  # which may be of another model
    done = succeeded("ask", "--model", "demo", "--max-tokens", "4", QUESTION)
    assert "No draft model: tiny-F32.gguf cannot draft for" in done.stderr
