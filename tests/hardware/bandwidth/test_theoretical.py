"""Tests the theoretical peak: the table of CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.hardware.bandwidth.theoretical import Theoretical, theoretical
from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.trees import make_tree


def test_all_channels_of_all_sockets(tmp_path: Path) -> None:
    assert theoretical(read_topology(make_tree(tmp_path, "2x-epyc-7543"))) == Theoretical(
        pytest.approx(409.6e9), "assumed: 16 channels × 3200 MT/s, the maximum of EPYC 7543", 16, 3200
    )


@pytest.mark.parametrize("tree", ["vm", "vm-without-caches", "garbage", "hybrid-desktop"])
def test_what_is_not_known_is_none(tmp_path: Path, tree: str) -> None:
    assert theoretical(read_topology(make_tree(tmp_path, tree))) is None


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [
        ("AMD EPYC 9654 96-Core Processor", 460.8),
        ("AMD EPYC 9754 128-Core Processor", 460.8),
        ("AMD EPYC 8534P 64-Core Processor", 230.4),
        ("AMD EPYC 7601 32-Core Processor", 170.624),
        ("AMD Ryzen Threadripper PRO 7995WX 96-Cores", 332.8),
        ("AMD Ryzen 9 7950X3D 16-Core Processor", 83.2),
        ("AMD Ryzen 7 9800X3D 8-Core Processor", 89.6),
        ("Intel(R) Xeon(R) Gold 6430", 307.2),
        ("Intel(R) Xeon(R) 6980P", 614.4),
    ],
)
def test_usual_memory(model: str, gigabytes: float) -> None:
    assert theoretical(Topology(model=model)).bytes_per_s == pytest.approx(1e9 * gigabytes)


@pytest.mark.parametrize("model", ["", "AMD EPYC", "AMD EPYC-Rome Processor", "AMD Ryzen 7 7840U", "Apple M2"])
def test_no_usual_memory(model: str) -> None:
    assert theoretical(Topology(model=model)) is None
