"""Machines and measurements for the tests of the read bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from cpuchat.measure import peak
from cpuchat.measure.peak import ReadBandwidth
from tests.hardware.trees import make_tree, write

Tree = Callable[[str], Path]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a machine without caches and with little free memory, so that measurements fill little."""
    return write(tmp_path / "small", {"proc/meminfo": f"MemTotal: {2 << 20} kB\nMemAvailable: {1 << 19} kB"})


@pytest.fixture(scope="package")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Return machines of `trees` that no test changes, each written once."""
    return lru_cache(lambda name: make_tree(tmp_path_factory.mktemp("trees"), name))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Simulate measurements of 10 GB/s per core that take no time. Returns what was measured."""
    calls: list[tuple[int, ...]] = []

    def instead(cpus: tuple[int, ...], **_: object) -> ReadBandwidth:
        calls.append(tuple(cpus))
        rate = 1e10 * len(cpus) + len(calls)
        return ReadBandwidth(tuple(cpus), rate, (rate / 2, rate))

    monkeypatch.setattr(peak, "measure", instead)
    return calls
