"""Tests the read probe: real measurements (short ones), and what goes wrong with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from cpuchat.base import paths
from cpuchat.base.errors import Interrupted, UsageError
from cpuchat.hardware.bandwidth import read_probe
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.hardware.topology import read_topology
from cpuchat.measure import peak
from cpuchat.measure.peak import ProbeFailed, ReadBandwidth, buffer_bytes, measure
from tests.hardware.trees import write
from tests.measure.conftest import Tree
from tests.support.cores import no_stacks

pytestmark = pytest.mark.slow

MIB = 1 << 20
CPU, *_ = own_cpus()
CPUS = own_cpus()[:2]


def short(cpus: tuple[int, ...] = CPUS, **more: Any) -> ReadBandwidth:
    return measure(cpus, **{"seconds": 0.2, "rounds": 2, **more})


# Measuring


def test_a_measurement(small: Path) -> None:
    found = short(root=small)
    assert found.cpus == CPUS
    assert len(found.rounds) == len(found.shares) == 2
    assert found.bytes_per_s == max(found.rounds)
    assert found.bytes_per_s > 1e8  # any memory of the last thirty years; beside load a round may read nothing
    assert all(0 <= share < 1.1 for share in found.shares)


def args(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_cancelling_ends_the_process(small: Path) -> None:
    seen: set[psutil.Process] = set()

    def when_it_runs() -> bool:
        seen.update(one for one in psutil.Process().children() if read_probe.__name__ in args(one))
        return bool(seen)

    with pytest.raises(Interrupted):
        short(seconds=60, root=small, cancelled=when_it_runs)
    assert len(seen) == 1
    psutil.wait_procs(seen, timeout=180)
    assert not [process for process in seen if process.is_running()]


def test_a_cpu_that_may_not_be_used(small: Path) -> None:
    with pytest.raises(ProbeFailed, match=r"CPU 4000 may not be used by this process.*Choose other"):
        short((CPU, 4000), root=small)


def test_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "buffer_bytes", lambda cpus, root: 1 << 55)
    with pytest.raises(ProbeFailed, match=rf"CPU {CPU}: Cannot allocate memory"):
        short((CPU,))


@pytest.mark.parametrize("content", ["damaged", "another library"])
def test_a_library_that_is_none_of_ours_is_said(content: str, monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    file = small / "libcpuchat-read.so"
    base = paths.engine_library("ggml-base")
    assert base is not None
    file.write_bytes(b"\x7fELF" * 99) if content == "damaged" else file.symlink_to(base)
    monkeypatch.setattr(paths, "engine_library", lambda name: file)
    with pytest.raises(ProbeFailed, match="reader cannot be used, reinstall the engine"):
        short(root=small)
    monkeypatch.setattr(paths, "engine_library", lambda name: None)
    with pytest.raises(ProbeFailed, match="built without"):
        short(root=small)


def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    def limited(*command: Any, **more: Any) -> subprocess.Popen[Any]:
        return popen(*command, preexec_fn=no_stacks, **more)

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", limited)
    with pytest.raises(ProbeFailed, match="no more threads may be started"):
        short(root=small)


def test_little_memory_says_so_and_measures_nothing(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 100000 kB"})
    with pytest.raises(ProbeFailed, match=r"needs 0.3 GB of free memory, 0.1 GB are free.*Close"):
        measure(CPUS, root=root)


def test_a_process_that_is_killed(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    monkeypatch.setattr(peak, "PROBE_MODULE", "tests.support.no_such_module")
    with pytest.raises(ProbeFailed, match="No module named"):
        short(root=small)
    with pytest.raises(ProbeFailed, match="ended: killed by SIGKILL"):
        peak.run_probe([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], lambda: False, 60)
    with pytest.raises(ProbeFailed, match="exit status 3"):
        peak.run_probe([sys.executable, "-c", "raise SystemExit(3)"], lambda: False, 60)
    with pytest.raises(ProbeFailed, match="timed out after 0 seconds"):
        peak.run_probe([sys.executable, "-c", "while True: pass"], lambda: False, 0.2)
    with pytest.raises(ProbeFailed, match="Cannot start"):
        peak.run_probe(["/no/such/program"], lambda: False, 60)


def test_the_policy_reaches_the_launcher_and_a_refused_one_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, small: Path
) -> None:
    assert short(policy="interleave:700", root=small).bytes_per_s > 1e8
    with pytest.raises(UsageError):
        measure(CPUS, policy="sideways")
    commands: list[list[str]] = []

    def run(command: list[str], *_: object) -> dict[str, Any]:
        commands.append(command)
        return {"rounds": [1e10]}

    monkeypatch.setattr(peak, "run_probe", run)
    measure(CPUS, policy="interleave:0-1")
    measure(CPUS)
    assert ["interleave:0-1" in command for command in commands] == [True, False]


# How much memory


@pytest.mark.parametrize(
    ("name", "cpus", "times"),
    [("epyc-9354", (0,), 8), ("epyc-9354", tuple(range(32)), 8), ("2x-epyc-7543", tuple(range(64)), 7)],
)
def test_no_cache_holds_what_is_read(tree: Tree, name: str, cpus: tuple[int, ...], times: int) -> None:
    root = tree(name)
    each = buffer_bytes(cpus, root)
    assert each * len(cpus) <= 3_900_000_000
    assert each % (2 * MIB) == 0
    topology = read_topology(root)
    for group in topology.l3_groups:
        threads = len(set(group.cpus) & set(cpus))
        assert threads == 0 or each * threads >= times * group.size


def test_never_more_than_a_quarter_of_what_is_free_and_of_hundreds_of_cores_less_each(
    tmp_path: Path, small: Path
) -> None:
    assert buffer_bytes((0, 1), small) * 2 <= 1 << 27
    root = write(tmp_path, {"proc/meminfo": f"MemTotal: {1 << 30} kB\nMemAvailable: {1 << 30} kB"})
    assert 0 < buffer_bytes(range(384), root) * 384 <= 3_900_000_000
