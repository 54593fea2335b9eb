"""Tests memory bandwidth monitoring, with recorded file contents and the words that stand where numbers should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpuchat.hardware.counters.base import CannotCount
from cpuchat.hardware.counters.resctrl import MemoryBandwidthMonitoring
from cpuchat.hardware.topology import read_topology
from tests.hardware.trees import make_tree, write

GB = 10**9
MOUNT = "sys/fs/resctrl"


def groups(root: Path, *texts: str | int, of: str = "") -> Path:
    """Write the counts of L3 groups 0, 1, ... of a control group."""
    files = {f"{MOUNT}/{of}mon_data/mon_L3_{n:02}/mbm_total_bytes": str(text) for n, text in enumerate(texts)}
    return write(root, files | {f"{MOUNT}/info/L3_MON/num_rmids": "256"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return groups(make_tree(tmp_path, "epyc-9334"), 0, 10 * GB, 20 * GB, 30 * GB)


def opened(root: Path) -> MemoryBandwidthMonitoring:
    return MemoryBandwidthMonitoring(read_topology(root), root)


def test_bytes_of_each_l3_group_by_time(root: Path) -> None:
    counter = opened(root)
    assert counter.sample(1.0) is None
    groups(root, 5 * GB, 16 * GB, 27 * GB, 38 * GB)
    found = counter.sample(1.5)
    assert found is not None
    assert found.per_l3 == (10 * GB, 12 * GB, 14 * GB, 16 * GB)
    assert found.total == 52 * GB
    assert (found.source, found.scope, found.read) == ("mbm", "machine", None)


def test_all_control_groups_count(root: Path) -> None:
    groups(root, 1 * GB, 1 * GB, 1 * GB, 1 * GB, of="mine/")
    groups(root, 9 * GB, 9 * GB, 9 * GB, 9 * GB, of="mine/mon_groups/part/")  # is in the group's own count
    counter = opened(root)
    counter.sample(1.0)
    groups(root, 3 * GB, 1 * GB, 1 * GB, 1 * GB, of="mine/")
    found = counter.sample(2.0)
    assert found is not None
    assert found.per_l3 == (2 * GB, 0, 0, 0)


def test_a_count_that_begins_anew(root: Path) -> None:
    counter = opened(root)
    counter.sample(1.0)
    groups(root, 0, 0, 0, 0)
    assert counter.sample(2.0) is None
    groups(root, 1 * GB, 0, 0, 0)
    found = counter.sample(3.0)
    assert found is not None
    assert found.total == GB


@pytest.mark.parametrize("word", ["Unavailable", "Unassigned", "Error", "12x"])
def test_a_word_once_makes_a_pause(root: Path, word: str) -> None:
    counter = opened(root)
    counter.sample(1.0)
    groups(root, 1 * GB, word)
    assert counter.sample(2.0) is None
    groups(root, 50 * GB, 50 * GB)  # counted while nobody looked: no interval to divide it by
    assert counter.sample(3.0) is None
    groups(root, 51 * GB, 50 * GB)
    found = counter.sample(4.0)
    assert found is not None
    assert found.total == GB


def test_words_for_long_end_it(root: Path) -> None:
    counter = opened(root)
    groups(root, "Unavailable")
    assert [counter.sample(float(second)) for second in range(9)] == [None] * 9
    with pytest.raises(CannotCount, match="Unavailable") as caught:
        counter.sample(10.0)
    assert "pqos" in caught.value.how


@pytest.mark.parametrize(
    ("word", "why", "how"),
    [
        ("Unavailable", "reports Unavailable", "pqos"),
        ("Unassigned", "reports Unassigned", "mbm_assign_mode"),
        ("Error", "reports Error", ""),
        ("\x1b[31m", "reports an unknown value", ""),
        ("", "not readable", "chmod"),
    ],
)
def test_words_from_the_start(root: Path, word: str, why: str, how: str) -> None:
    groups(root, 1, 2, word)
    with pytest.raises(CannotCount, match=why) as caught:
        opened(root)
    assert how in caught.value.how


def test_numbers_that_are_not_those_of_the_caches_give_the_sum_only(root: Path) -> None:
    groups(root, 1, 2, 3, 4, 5)
    counter = opened(root)
    counter.sample(1.0)
    groups(root, 1, 2, 3, 4, 5 + GB)
    found = counter.sample(2.0)
    assert found is not None
    assert found.per_l3 == ()
    assert found.total == GB


def test_what_refuses(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9334")
    topology = read_topology(root)
    with pytest.raises(CannotCount, match="not mounted") as caught:
        MemoryBandwidthMonitoring(topology, root)
    assert "mount -t resctrl" in caught.value.how
    write(root, {f"{MOUNT}/info/L3/num_closids": "16"})
    with pytest.raises(CannotCount, match="no monitoring groups"):
        MemoryBandwidthMonitoring(topology, root)
    with pytest.raises(CannotCount, match="no memory bandwidth monitoring"):
        MemoryBandwidthMonitoring(replace(topology, flags=frozenset({"avx2"})), root)


def test_unmounting_ends_it(root: Path) -> None:
    counter = opened(root)
    counter.sample(1.0)
    (root / MOUNT).rename(root / "elsewhere")
    assert [counter.sample(float(second)) for second in range(2, 11)] == [None] * 9
    with pytest.raises(CannotCount, match="unmounted"):
        counter.sample(11.0)


def test_a_number_beyond_all_sense_is_none(root: Path) -> None:
    groups(root, "9" * 5000)
    with pytest.raises(CannotCount, match="an unknown value"):
        opened(root)
