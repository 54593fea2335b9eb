"""The server that the checks examine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hardware.counters.simulated import umc
from tests.hardware.diagnostics.servers import read_rate
from tests.hardware.trees import make_tree, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a server without problems: EPYC 9354, a counter, measured."""
    root = make_tree(tmp_path, "epyc-9354")
    read_rate(root, 378.2)
    umc(root, 0, "0")
    return write(root, {"proc/loadavg": "0.52 0.58 0.59 2/1234 5678"})
