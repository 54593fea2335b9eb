"""Tests what a survey of a machine measures, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cpuchat.hardware.bandwidth import read_bandwidth
from cpuchat.hardware.bandwidth.read_bandwidth import Survey, cached_survey, survey
from cpuchat.hardware.machine import MachineReader
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.hardware.topology import read_topology

pytestmark = pytest.mark.slow


def surveyed(root: Path, **more: Any) -> tuple[Survey, list[str]]:
    seen: list[str] = []
    found = survey(read_topology(root), lambda done, total, what: seen.append(what), root=root, **more)
    return found, seen


def test_a_survey_of_a_server(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    root = tree("epyc-9354")
    found, seen = surveyed(root)
    assert found.all_cores.cpus == tuple(range(32))
    assert found.one_core.cpus == (0,)
    assert found.l3_group is not None and found.l3_group.cpus == (0, 1, 2, 3)
    assert len(measured) == len(set(measured)) == len(seen)


def test_a_survey_is_kept_with_its_peak(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    root = tree("2x-epyc-7543")
    topology = read_topology(root)
    assert cached_survey(topology, root=root) is None
    found, _ = surveyed(root, policy="interleave:0-1")
    assert cached_survey(topology, policy="interleave:0-1", root=root) == found
    assert cached_survey(topology, cpus=(0, 1), policy="interleave:0-1", root=root) is None
    peak = read_bandwidth.known_peak(found.all_cores.cpus, "interleave:0-1", root=root)
    assert peak is not None and peak.bytes_per_s == found.all_cores.bytes_per_s
    key = read_bandwidth._key("survey", found.all_cores.cpus, "interleave:0-1", root)
    read_bandwidth._cache().put(key, {"one_core": 1})
    assert cached_survey(topology, policy="interleave:0-1", root=root) is None


def test_a_survey_of_another_policy_is_not_shown(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    root = tree("2x-epyc-7543")
    found, _ = surveyed(root, policy="bind:0")
    assert cached_survey(read_topology(root), policy="interleave:0-1", root=root) is None
    assert MachineReader(root).facts().survey is None  # "auto" interleaves over both nodes
    assert MachineReader(root).facts(PlacementSpec(memory_policy="bind:0")).survey == found
    assert MachineReader(root).facts(PlacementSpec(memory_policy="bind:7")).survey is None


@pytest.mark.parametrize("name", ["vm-without-caches", "garbage", "hybrid-desktop"])
def test_every_machine_can_be_surveyed(tree: Callable[[str], Path], measured: list[tuple[int, ...]], name: str) -> None:
    found, _ = surveyed(tree(name))
    assert found.one_core.cpus[0] in found.all_cores.cpus
    assert msgspec.json.decode(msgspec.json.encode(found))["one_core"]["cpus"] == [found.one_core.cpus[0]]
