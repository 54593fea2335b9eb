"""Simulated machines that several tests read without changing them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.trees import make_tree


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Topology]:
    """The topology of a tree of `trees.NAMES`, written and read once."""
    known: dict[str, Topology] = {}

    def get(name: str) -> Topology:
        if name not in known:
            known[name] = read_topology(make_tree(tmp_path_factory.mktemp("machine"), name))
        return known[name]

    return get
