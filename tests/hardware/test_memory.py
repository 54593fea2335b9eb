"""Tests available memory and CPU quotas under limits, on simulated machines, and on this one."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from cpuchat.hardware import memory
from cpuchat.hardware.sysfs import cpu_quota
from tests.hardware.trees import write

GIB = 1 << 30
GROUPS = "sys/fs/cgroup"
MEMINFO = {"proc/meminfo": f"MemTotal:  {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB\nHugePages_Total: 0"}


def in_group(group: str) -> dict[str, str]:
    return {"proc/self/cgroup": f"0::{group}", f"{GROUPS}/cgroup.controllers": "cpu memory"}


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 16, 12),
        # The tightest group's, where cache counts as free.
        ({
            **in_group("/user/app"),
            f"{GROUPS}/user/app/memory.max": "max", f"{GROUPS}/user/app/memory.current": str(3 * GIB),
            f"{GROUPS}/user/memory.max": str(8 * GIB), f"{GROUPS}/user/memory.current": str(6 * GIB),
            f"{GROUPS}/user/memory.stat":
                f"anon 1\nactive_file {2 * GIB}\ninactive_file {GIB}\nslab_reclaimable 0\nfile 99999999999",
        }, 8, 5),
        # A pod with memory QoS, or a systemd slice with MemoryHigh: above it pages are dropped as fast as they are
        # read; nothing is killed, and nothing goes on.
        ({
            **in_group("/pod"), f"{GROUPS}/pod/memory.max": "max", f"{GROUPS}/pod/memory.high": str(4 * GIB),
            f"{GROUPS}/pod/memory.current": str(GIB),
        }, 4, 3),
        ({
            "proc/self/cgroup": "4:memory:/jobs/7\n0::/",
            f"{GROUPS}/memory/jobs/7/memory.limit_in_bytes": str(4 * GIB),
            f"{GROUPS}/memory/jobs/7/memory.usage_in_bytes": str(3 * GIB),
            f"{GROUPS}/memory/jobs/7/memory.stat":
                f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}",
            f"{GROUPS}/memory/memory.limit_in_bytes": "9223372036854771712",
            f"{GROUPS}/memory/memory.usage_in_bytes": "0",
        }, 4, 3),
    ],
    ids=["no limit", "version 2", "memory.high", "version 1"],
)  # fmt: skip
def test_limits_of_control_groups(tmp_path: Path, files: dict[str, str], total: int, available: int) -> None:
    root = write(tmp_path, MEMINFO | files)
    assert (memory.total_bytes(root), memory.available_bytes(root)) == (total * GIB, available * GIB)


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


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({
            **in_group("/a/b"), f"{GROUPS}/a/b/cpu.max": "max 100000", f"{GROUPS}/a/cpu.max": "250000 100000",
            f"{GROUPS}/cpu.max": "800000 100000",
        }, 2.5),
        # In a container what is visible.
        ({**in_group("/docker/0123"), f"{GROUPS}/cpu.max": "150000 100000"}, 1.5),
        ({
            "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/jobs/7\n0::/",
            f"{GROUPS}/cpu,cpuacct/jobs/7/cpu.cfs_quota_us": "300000",
            f"{GROUPS}/cpu,cpuacct/jobs/7/cpu.cfs_period_us": "100000",
            f"{GROUPS}/cpu,cpuacct/cpu.cfs_quota_us": "-1", f"{GROUPS}/cpu,cpuacct/cpu.cfs_period_us": "100000",
        }, 3.0),
        ({}, None),
        *(({**in_group("/"), f"{GROUPS}/cpu.max": text}, None)
          for text in ("", "max 100000", "nonsense", "100000", "100000 0")),
    ],
)  # fmt: skip
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(write(tmp_path, files)) == quota
