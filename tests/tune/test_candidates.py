"""Tests what tuning tries, on simulated machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.config.settings import Settings, with_changes
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.tune import candidates
from cpuchat.tune.candidates import TuningChoice
from tests.hardware.trees import NAMES, make_tree


def machine(tmp_path: Path, name: str) -> Topology:
    return read_topology(make_tree(tmp_path, name))


def numbers_of_threads(topology: Topology, choice: TuningChoice) -> list[int]:
    return [len(place(topology, PlacementSpec.of(one.settings)).cpus) for one in choice.candidates]


@pytest.mark.parametrize("name", ["2x-epyc-7543", "xeon-6430", "container"])
def test_every_candidate_is_possible_and_differs(tmp_path: Path, name: str) -> None:
    topology, chosen = machine(tmp_path, name), Settings()
    now = place(topology, PlacementSpec.of(chosen))
    for choice in (candidates.thread_choice(topology, chosen), candidates.memory_choice(topology, chosen)):
        found = [place(topology, PlacementSpec.of(one.settings)) for one in choice.candidates]
        resolved = [(one.cpus, one.memory_policy) for one in (now, *found)]
        assert len(set(resolved)) == len(resolved)
        assert len({one.words for one in choice.candidates}) == len(choice.candidates)
        assert bool(choice.candidates) or choice.skipped or len(now.cpus) == 1


def test_smt_siblings_are_tried_without_being_asked_for(tmp_path: Path) -> None:
    topology = machine(tmp_path, next(name for name in NAMES if machine(tmp_path / name, name).smt))
    choice = candidates.thread_choice(topology, Settings())
    assert "one per core" in choice.now.words
    wide = [one for one in choice.candidates if "two per core" in one.words]
    assert wide
    assert max(numbers_of_threads(topology, choice)) == len(topology.allowed)
    # What was adopted is compared with one per core the next time.
    again = candidates.thread_choice(topology, wide[0].settings)
    assert "two per core" in again.now.words
    assert len(topology.allowed_cores) in numbers_of_threads(topology, again)


def test_flash_attention_is_left_on_for_a_quantized_cache() -> None:
    assert [one.words for one in candidates.attention_choice(Settings()).candidates] == ["off"]
    off = with_changes(Settings(), {"engine": {"flash_attn": "off"}})
    assert [one.words for one in candidates.attention_choice(off).candidates] == ["auto"]
    quantized = with_changes(Settings(), {"engine": {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}})
    assert candidates.attention_choice(quantized).skipped


def test_micro_batches_are_no_longer_than_the_prompt() -> None:
    choice = candidates.ubatch_choice(Settings(), 600)
    assert [one.words for one in choice.candidates] == ["128", "256"]
    large = candidates.ubatch_choice(Settings(), 2000).candidates[-1].settings.engine
    assert (large.n_ubatch, large.n_batch) == (1024, 1024)
    assert candidates.ubatch_choice(Settings(), 100).skipped


def test_drafters_are_compared_with_fewer_and_with_none() -> None:
    def tried(draft: str, **now: object) -> list[str]:
        chosen = with_changes(Settings(), {"speculation": now})
        return [one.words for one in candidates.drafter_choice(chosen, draft).candidates]

    assert tried("draft.gguf") == ["suffix", "off"]
    assert tried("draft.gguf", depth=4) == ["auto", "suffix", "off"]
    assert tried("") == ["off"]  # without a draft model, suffix decoding is all
    assert tried("", drafters="off") == ["auto"]


@pytest.mark.parametrize(
    ("changes", "skipped"),
    [
        ({"engine": {"threads": 3}}, ""),
        ({"engine": {"threads": 3, "memory_policy": "local"}}, "set by you: memory_policy = local"),
        ({"engine": {"ctx": 2048}}, ""),
    ],
)
def test_what_the_user_set_is_left_alone_but_for_threads(
    tmp_path: Path, changes: dict[str, dict[str, object]], skipped: str
) -> None:
    topology, wanted = machine(tmp_path, NAMES[0]), with_changes(Settings(), changes)
    choice = candidates.without_what_is_set(candidates.thread_choice(topology, wanted), wanted)
    assert choice.skipped == skipped
    assert bool(choice.candidates) != bool(skipped)
