"""Tests CPU quotas of made-up control groups under a temporary root."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.hardware.sysfs import cpu_quota
from tests.hardware.knob_files import write


def v2(root: Path, group: str, files: dict[str, str]) -> Path:
    write(root, {"proc/self/cgroup": f"0::{group}", "sys/fs/cgroup/cgroup.controllers": "cpu memory"})
    return write(root, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def test_quota_version_2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    root = v2(tmp_path, "/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000", "cpu.max": "800000 100000"})
    assert cpu_quota(root) == 2.5


def test_quota_in_a_container_whose_path_is_not_visible(tmp_path: Path) -> None:
    root = v2(tmp_path, "/docker/0123", {"cpu.max": "150000 100000"})
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
