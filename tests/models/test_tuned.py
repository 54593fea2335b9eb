"""Tests keeping what tuning found, and applying it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cpuchat.config.settings import Settings, with_changes
from cpuchat.hardware.topology import read_topology
from cpuchat.models.machine import Tuned, TunedChoice, differences, find_tuned, keep_tuned
from tests.support.tiny_gguf import write_tiny_gguf

TUNED = Tuned(
    model="tiny",
    changes={"engine": {"threads": 2, "cores": "0,1", "flash_attn": "off"}, "speculation": {"depth": 4}},
    choices=(TunedChoice(keys=("engine.threads", "engine.cores"), words="2 threads", decode=0.1, prefill=0.2),),
)


def test_values_replace_defaults_only() -> None:
    found = TUNED.applied_to(Settings())
    assert (found.engine.threads, found.engine.cores, found.engine.flash_attn) == (2, "0,1", "off")
    assert found.speculation.depth == 4
    assert differences(Settings(), found) == TUNED.changes


@pytest.mark.parametrize("changes", [{"engine": {"threads": 5}}, {"engine": {"memory_policy": "local"}}])
def test_what_the_user_set_wins_with_all_that_belongs_to_it(changes: dict[str, dict[str, object]]) -> None:
    chosen = with_changes(Settings(), changes)
    found = TUNED.applied_to(chosen)
    assert (found.engine.threads, found.engine.cores) == (chosen.engine.threads, "auto")
    assert found.engine.flash_attn == "off"
    other = with_changes(Settings(), {"engine": {"cache_type_v": "q8_0"}})
    assert TUNED.applied_to(other).engine.flash_attn == "auto"


def test_it_belongs_to_the_content_and_the_machine(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_tuned(tiny_model, TUNED)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_model.read_bytes())
    assert find_tuned(copy) == TUNED
    assert find_tuned(write_tiny_gguf(tmp_path / "other.gguf", with_template=False)) is None
    assert find_tuned(tmp_path / "gone.gguf") is None
    half = dataclasses.replace(read_topology(), quota=0.5)
    monkeypatch.setattr("cpuchat.models.machine.read_topology", lambda: half)
    assert find_tuned(tiny_model) is None


def test_values_that_are_not_valid_any_more_are_ignored(tiny_model: Path) -> None:
    keep_tuned(tiny_model, Tuned(model="tiny", changes={"engine": {"threads": "many", "magic": 1}}))
    assert find_tuned(tiny_model) is None
