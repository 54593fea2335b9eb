"""Topology and quotas, on made-up machines under a temporary root, and on this one."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from cpuchat.errors import UsageError
from cpuchat.hardware import cpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def topology(root: Path, cores: list[list[int]], name: str = "thread_siblings_list") -> Path:
    files = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": ",".join(map(str, siblings))
        for siblings in cores
        for cpu in siblings
    }
    return write(root, files)


def v2(root: Path, group: str, files: dict[str, str]) -> Path:
    write(root, {"proc/self/cgroup": f"0::{group}", "sys/fs/cgroup/cgroup.controllers": "cpu memory"})
    return write(root, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def test_parse_cpu_list() -> None:
    assert cpus.parse_cpu_list("0-3,8, 10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert cpus.parse_cpu_list("") == ()
    assert cpus.parse_cpu_list("a-b,-3,5-") == (5,)


@pytest.mark.parametrize("name", ["thread_siblings_list", "core_cpus_list"])
def test_one_cpu_per_core(tmp_path: Path, name: str) -> None:
    # Server numbering: first threads 0-3, their siblings 4-7.
    root = topology(tmp_path, [[0, 4], [1, 5], [2, 6], [3, 7]], name)
    assert cpus.allowed_physical_cores(range(8), root) == (0, 1, 2, 3)
    assert cpus.allowed_physical_cores((2, 3, 6, 7), root) == (2, 3)
    # The sibling stands for its core when only that one is allowed.
    assert cpus.allowed_physical_cores((5, 6), root) == (5, 6)


def test_neighbouring_siblings_and_single_threads(tmp_path: Path) -> None:
    # A hybrid laptop: two cores with two threads each, then four with one.
    root = topology(tmp_path, [[0, 1], [2, 3], [4], [5], [6], [7]])
    assert cpus.allowed_physical_cores(range(8), root) == (0, 2, 4, 5, 6, 7)


def test_a_range_as_sibling_list(tmp_path: Path) -> None:
    root = write(tmp_path, {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": "0-1" for n in (0, 1)})
    assert cpus.allowed_physical_cores((0, 1), root) == (0,)


def test_without_topology_every_cpu_is_a_core(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    assert cpus.allowed_physical_cores((1, 2, 5), tmp_path) == (1, 2, 5)


def test_without_sysfs_psutil_counts(tmp_path: Path) -> None:
    cores = cpus.allowed_physical_cores(range(64), tmp_path)
    assert len(cores) == (psutil.cpu_count(logical=False) or 64)


def test_quota_version_2_takes_the_tightest_ancestor(tmp_path: Path) -> None:
    root = v2(tmp_path, "/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000", "cpu.max": "800000 100000"})
    assert cpus.cpu_quota(root) == 2.5


def test_quota_in_a_container_whose_path_is_not_visible(tmp_path: Path) -> None:
    root = v2(tmp_path, "/docker/0123", {"cpu.max": "150000 100000"})
    assert cpus.cpu_quota(root) == 1.5
    assert cpus.default_threads(root) == 1


def test_quota_version_1(tmp_path: Path) -> None:
    root = write(tmp_path, {
        "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/jobs/7\n0::/",
        "sys/fs/cgroup/cpu,cpuacct/jobs/7/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu,cpuacct/jobs/7/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    assert cpus.cpu_quota(root) == 3.0


@pytest.mark.parametrize("text", ["", "max 100000", "nonsense", "100000", "100000 0"])
def test_no_quota(tmp_path: Path, text: str) -> None:
    assert cpus.cpu_quota(v2(tmp_path, "/", {"cpu.max": text})) is None
    assert cpus.cpu_quota(tmp_path / "empty") is None


def test_this_machine() -> None:
    allowed = cpus.allowed_cpus()
    assert allowed == tuple(sorted(os.sched_getaffinity(0)))
    cores = cpus.allowed_physical_cores()
    assert 1 <= len(cores) <= len(allowed)
    assert set(cores) <= set(allowed)
    assert 1 <= cpus.default_threads() <= len(cores)
    assert cpus.validate_threads(0) == cpus.default_threads()
    assert cpus.validate_threads(1) == 1


def test_affinity_is_respected() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cpus.allowed_cpus() == (min(allowed),)
        assert cpus.default_threads() == 1
        with pytest.raises(UsageError, match=r"2 threads cannot be used: this process may use 1 CPU .* Choose 1 to 1"):
            cpus.validate_threads(2)
    finally:
        os.sched_setaffinity(0, allowed)


def test_wrong_thread_counts_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="physical core"):
        cpus.validate_threads(100_000)
    with pytest.raises(UsageError):
        cpus.validate_threads(-1)
    root = topology(v2(tmp_path, "/", {"cpu.max": "50000 100000"}), [[cpu] for cpu in cpus.allowed_cpus()])
    assert cpus.default_threads(root) == 1
    if len(cpus.allowed_cpus()) > 1:
        with pytest.raises(UsageError, match=r"grants the time of 0\.5 CPUs"):
            cpus.validate_threads(2, root)
