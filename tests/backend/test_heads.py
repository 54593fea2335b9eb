"""Tests that the text of a model that drafts with its head is that without, through what happens in chats."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.protocol.messages import Sampling
from tests.support.head_model import write_head_model
from tests.support.head_texts import GREEDY, SAMPLED, WEIGHT, compare_texts


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_the_text_with_a_head_is_that_without(tmp_path: Path, sampling: Sampling) -> None:
    """benchmarks/heads.py --only texts compares 200 prompts."""
    model = write_head_model(tmp_path / "model.gguf", 0.7, quant="Q8_0", weight=WEIGHT)
    found = await compare_texts(model, tmp_path, range(4), sampling, restart_every=2)
    assert found.different == []
    assert found.answers == 4 * 6 + 2 and len(found.distinct) == 4
    # How far an answer got before it was stopped varies.
    assert all(found.accepted[what] for what in ("answer", "edited", "restarted"))
