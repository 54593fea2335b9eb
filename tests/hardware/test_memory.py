"""Tests available memory and CPU quotas under limits, on simulated machines, and on this one."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from cpuchat.hardware import memory
from cpuchat.hardware.sysfs import cpu_quota
from tests.hardware.trees import write

GIB = 1 << 30
MEMINFO = {"proc/meminfo": f"MemTotal:  {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB\nHugePages_Total: 0"}


def v2(root: Path, group: str, files: dict[str, str]) -> Path:
    write(root, {"proc/self/cgroup": f"0::{group}", "sys/fs/cgroup/cgroup.controllers": "cpu memory"})
    return write(root, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def test_without_limits(tmp_path: Path) -> None:
    root = write(tmp_path, MEMINFO)
    assert memory.total_bytes(root) == 16 * GIB
    assert memory.available_bytes(root) == 12 * GIB


def test_version_2_limit_less_usage_and_cache_counts_as_free(tmp_path: Path) -> None:
    root = v2(write(tmp_path, MEMINFO), "/user/app", {
        "user/app/memory.max": "max",
        "user/app/memory.current": str(3 * GIB),
        "user/memory.max": str(8 * GIB),
        "user/memory.current": str(6 * GIB),
        "user/memory.stat": f"anon 1\nactive_file {2 * GIB}\ninactive_file {GIB}\nslab_reclaimable 0\nfile 99999999999",
    })  # fmt: skip
    assert memory.total_bytes(root) == 8 * GIB
    assert memory.available_bytes(root) == 5 * GIB


def test_above_memory_high_pages_are_dropped_as_fast_as_they_are_read(tmp_path: Path) -> None:
    """A pod with memory QoS, or a systemd slice with MemoryHigh: nothing is killed, and nothing goes on."""
    root = v2(write(tmp_path, MEMINFO), "/pod", {
        "pod/memory.max": "max", "pod/memory.high": str(4 * GIB), "pod/memory.current": str(GIB),
    })  # fmt: skip
    assert (memory.total_bytes(root), memory.available_bytes(root)) == (4 * GIB, 3 * GIB)


def test_version_1_limit(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/jobs/7"
    root = write(tmp_path, {
        **MEMINFO,
        "proc/self/cgroup": "4:memory:/jobs/7\n0::/",
        f"{folder}/memory.limit_in_bytes": str(4 * GIB),
        f"{folder}/memory.usage_in_bytes": str(3 * GIB),
        f"{folder}/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
    })  # fmt: skip
    assert memory.total_bytes(root) == 4 * GIB
    assert memory.available_bytes(root) == 3 * GIB


def test_without_proc_psutil_answers(tmp_path: Path) -> None:
    assert memory.total_bytes(tmp_path) == psutil.virtual_memory().total
    assert memory.available_bytes(tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_memory_of_some_nodes(tmp_path: Path) -> None:
    nodes = "sys/devices/system/node"
    for number, free in enumerate((4, 20, 0)):
        folder = tmp_path / f"{nodes}/node{number}"
        folder.mkdir(parents=True)
        lines = {"MemTotal": 64 << 20, "MemFree": free << 20, "Active(file)": 2 << 20, "Inactive(file)": 1 << 20}
        text = "\n".join(f"Node {number} {name}: {kib:>12} kB" for name, kib in (lines | {"SReclaimable": 512}).items())
        (folder / "meminfo").write_text(text + "\n")
    (tmp_path / f"{nodes}/has_memory").write_text("0-1\n")
    assert memory.available_on((0,), tmp_path) == 7 * GIB + (512 << 10)
    assert memory.available_on((1,), tmp_path) == 23 * GIB + (512 << 10)
    assert memory.available_on((0, 1), tmp_path) is None is memory.available_on((), tmp_path)  # all there is
    assert memory.available_on((7,), tmp_path) is None
    assert memory.available_on((0,), tmp_path / "nowhere") is None


def test_quota_version_2_takes_the_tightest_ancestor_and_in_a_container_what_is_visible(tmp_path: Path) -> None:
    root = v2(tmp_path, "/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000", "cpu.max": "800000 100000"})
    assert cpu_quota(root) == 2.5
    root = v2(tmp_path / "container", "/docker/0123", {"cpu.max": "150000 100000"})
    assert cpu_quota(root) == 1.5


def test_quota_version_1(tmp_path: Path) -> None:
    root = write(tmp_path, {
        "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/jobs/7\n0::/",
        "sys/fs/cgroup/cpu,cpuacct/jobs/7/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu,cpuacct/jobs/7/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    assert cpu_quota(root) == 3.0


@pytest.mark.parametrize("text", ["", "max 100000", "nonsense", "100000", "100000 0"])
def test_no_quota(tmp_path: Path, text: str) -> None:
    assert cpu_quota(v2(tmp_path, "/", {"cpu.max": text})) is None
    assert cpu_quota(tmp_path / "empty") is None
