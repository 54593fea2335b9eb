from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat import settings
from cpuchat.hardware.placement.resolve import Arrangement, resolve
from cpuchat.hardware.topology import read_topology
from cpuchat.settings import Settings
from tests.hardware.trees import make_tree


def test_words_become_cores_and_nodes(tmp_path: Path) -> None:
    topology = read_topology(make_tree(tmp_path, "2x-epyc-7543"))
    found = resolve(Arrangement(), topology)
    assert (found.target, found.draft, found.memory) == (tuple(range(64)), None, "interleave:0-1")
    found = resolve(Arrangement(cores="socket:0", draft_cores="socket:1"), topology)
    assert (found.target, found.draft) == (tuple(range(32)), tuple(range(32, 64)))
    assert found.problems == ()


def test_the_target_leaves_the_cores_of_the_draft_alone(tmp_path: Path) -> None:
    topology = read_topology(make_tree(tmp_path, "epyc-9354"))
    found = resolve(Arrangement(draft_cores="l3:7"), topology)
    assert (found.target, found.draft) == (tuple(range(28)), tuple(range(28, 32)))


@pytest.mark.parametrize(
    ("arrangement", "part", "says"),
    [
        (Arrangement(cores="l3:9"), "cores", "L3 group 9 is not there"),
        (Arrangement(draft_cores="node:4"), "draft_cores", "4"),
        (Arrangement(memory="bind:3"), "memory", "Node 3 has no memory"),
        (Arrangement(threads=33), "threads", "33 threads cannot be used"),
        (Arrangement(cores="99999"), "cores", ""),
    ],
)
def test_what_is_wrong_is_told_by_its_part(tmp_path: Path, arrangement: Arrangement, part: str, says: str) -> None:
    topology = read_topology(make_tree(tmp_path, "epyc-9354"))
    ((name, problem),) = resolve(arrangement, topology).problems
    assert name == part and says in problem


def test_it_is_what_the_settings_say() -> None:
    arrangement = Arrangement("4/l3", "l3:0", "interleave", 8)
    assert Arrangement.of(arrangement.put_into(Settings())) == arrangement
    settings.update(arrangement.changes())
    assert Arrangement.of(settings.load()) == arrangement
