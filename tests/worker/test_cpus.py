"""Tests a real worker whose CPUs become fewer and more again, as in a container whose cpuset is changed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import LoadOptions
from tests.support.chatting import chat, collect

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's"),
]


def allow(pid: int, cpus: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cpus)


async def test_fewer_cpus_compute_with_fewer_threads_and_say_so(tiny_model: Path, other: LocalBackend) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("one CPU only")
    spec = PlacementSpec(cores=f"{cpus[0]},{cpus[1]}")
    await collect(other.load(tiny_model, LoadOptions(n_ctx=512), spec))
    before = await collect(other.generate(chat("hello")))
    pid = other.pid
    assert pid is not None
    allow(pid, {cpus[1]})
    fewer = await collect(other.generate(chat("hello")))
    assert fewer.finished.note == "2 → 1 thread: only 1 CPU is allowed now"
    allow(pid, set(cpus))
    after = await collect(other.generate(chat("hello")))
    assert "allowed" not in after.finished.note
    assert before.text == fewer.text == after.text
