"""Tests what the kernel says of processes: this one, and made-up ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from subprocess import PIPE

import pytest

from cpuchat.hardware.process import BusyPrograms, MemoryPages, ThreadCpus, memory_pages, process_memory, thread_cpus
from tests.hardware.trees import write


def test_threads_and_pages_of_this_process() -> None:
    [found] = thread_cpus(os.getpid(), [threading.get_native_id()])
    assert found.allowed == tuple(sorted(os.sched_getaffinity(0)))
    assert found.ran_on in found.allowed
    assert memory_pages(os.getpid()).resident > 1 << 20


def test_made_up_processes(tmp_path: Path) -> None:
    fields = " ".join(str(n) for n in range(4, 53))
    write(tmp_path, {
        "proc/7/task/8/status": "Name:\ta) b\nCpus_allowed_list:\t3,5-6\n",
        "proc/7/task/8/stat": f"8 (a) b) S {fields}",
        "proc/7/task/9/status": "Cpus_allowed_list:\t1",
        "proc/7/smaps_rollup": "562706afc000-7ffe742b9000 ---p 00000000 00:00 0 [rollup]\nRss:   4096 kB\n"
        "AnonHugePages:  2048 kB\nShmemPmdMapped: 0 kB\nFilePmdMapped:  1024 kB\nLocked:    8 kB\n",
    })  # fmt: skip
    assert thread_cpus(7, [8, 9, 10], tmp_path) == (ThreadCpus((3, 5, 6), 39), ThreadCpus((1,), None))
    assert memory_pages(7, tmp_path) == MemoryPages(4 << 20, 2 << 20, 1 << 20, 8 << 10)
    assert memory_pages(8, tmp_path) is None


def test_programs_that_compute_are_named_but_never_this_one_or_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child of a child is its own, too; one that began since the last look counts from its start."""
    now = [100.0]
    monkeypatch.setattr("cpuchat.hardware.process.monotonic", lambda: now[0])
    found, own = BusyPrograms(tmp_path), os.getpid()

    def stat(pid: int, name: str, parent: int, ticks: int, cpu: int = 0) -> str:
        return f"{pid} ({name}) S {parent}{' 0' * 9} {ticks} 0{' 0' * 23} {cpu}"

    for ticks, names in ((0, ()), (150, ("a) b (PID 8 and 1 more)", "another cpuchat (PID 6)"))):
        processes = [(7, "a) b", 1, ticks // 3), (9, "kworker/1:2", 2, ticks), (own, "cpuchat", 1, ticks)]
        processes += [(11, "worker", own, ticks), (12, "probe", 11, ticks), (5, "sh", 1, ticks // 10)]
        processes += [(8, "a) b", 1, 4 * ticks // 3), (6, "python", 20, ticks), (20, "cpuchat", 1, 0)] if ticks else []
        write(tmp_path, {f"proc/{one[0]}/stat": stat(*one) for one in processes})
        write(tmp_path, {f"proc/12/task/{n}/stat": stat(n, "x", 11, ticks, n - 12) for n in (12, 13)})
        assert found.names(3.0 if ticks else 0.0) == names
        assert found.own_ticks() == ({0: 150, 1: 150} if ticks else {})
        now[0] += 2.0


_HOLDER = """
import mmap, sys
def wait():
    print(flush=True)
    sys.stdin.readline()
wait()
own = mmap.mmap(-1, 32 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
for at in range(0, 32 << 20, 4096):
    own[at] = 1 + mapped[at]
wait()
"""


def test_private_and_shared_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"y" * (32 << 20))
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(file)], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdin and child.stdout and child.stdout.readline()
        before = process_memory(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline()
        after = process_memory(child.pid)
        child.stdin.close()
    assert 1 << 20 < before.private < 32 << 20
    assert after.private - before.private >= 32 << 20
    assert after.shared - before.shared >= 32 << 20


def test_a_process_that_is_gone_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is waited for
        assert process_memory(child.pid) is None
    assert process_memory(child.pid) is None


@pytest.mark.parametrize(
    ("code", "slow"),
    [
        # The thread of the screens, while a model loads; before each worker; beside what is measured; at each start.
        ("from cpuchat.hardware.process import process_memory; process_memory(os.getpid())", "psutil"),
        ("import cpuchat.hardware.numa.mempolicy", "dataclasses asyncio msgspec numpy psutil argparse"),
        ("import cpuchat.hardware.bandwidth.read_probe", "numpy msgspec psutil"),
        ("import cpuchat.models.library.library, cpuchat.models.downloads.manager", "numpy huggingface_hub httpx"),
    ],
)
def test_what_must_be_quick_imports_nothing_slow(code: str, slow: str) -> None:
    code = f"import os, sys; {code}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {*slow.split()}.isdisjoint(loaded)
