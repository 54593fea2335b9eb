"""A machine of several cores, whatever the tests run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.trees import Machine, server


def simulate_topology(monkeypatch: pytest.MonkeyPatch, root: Path) -> Topology:
    """Make everything read the topology of a desktop with 8 cores, below `root`."""
    topology = read_topology(server(root, Machine("AMD Ryzen 7 7700", 25, 97, 1, 8)))
    for module in ("cpuchat.hardware.topology", "cpuchat.models.machine"):
        monkeypatch.setattr(f"{module}.read_topology", lambda *_: topology)
    return topology
