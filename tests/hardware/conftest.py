"""Simulated machines that several tests read without changing them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.trees import make_tree

Machine = Callable[[str], Topology]


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The topology of a tree of `trees.NAMES`, written and read once."""
    return cache(lambda name: read_topology(make_tree(tmp_path_factory.mktemp("machine"), name)))
