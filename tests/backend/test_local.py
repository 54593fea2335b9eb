"""Tests starting workers: under a memory policy, again under another one, and at full priority."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cpuchat.backend import local
from cpuchat.backend.local import LocalBackend
from cpuchat.backend.process import Launch, WorkerProcess
from cpuchat.hardware.numa.mempolicy import parse_policy
from cpuchat.hardware.placement.placement import Placement, PlacementSpec
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.models.cpu_modules import installed
from cpuchat.protocol.messages import Failed, LoadOptions, ModelLoaded, StateKey, WorkerReady
from tests.support.chatting import chat, children, collect, in_use
from tests.support.cores import ON_ONE_CPU

# Niceness can only be raised, so a process of its own does it: a chat's worker, then one of a comparison's and a
# measurement of an app that has lowered itself.
_NICE = """
import asyncio, os, sys
from cpuchat.backend.local import LocalBackend
from cpuchat.compare.comparison import Comparison
from cpuchat.compare.runner import Side
from cpuchat.config.settings import Settings
from cpuchat.measure.peak import run_probe
from cpuchat.tui import threads

async def main() -> None:
    nices = [os.getpriority(os.PRIO_PROCESS, 0)]

    async def start(backend: LocalBackend) -> None:
        assert await backend.start() is None
        nices.append(os.getpriority(os.PRIO_PROCESS, backend.pid))
        await backend.close()

    await start(LocalBackend())
    threads.NICENESS = nices[0] + 3  # more than the tests may run with
    threads.yield_to_inference()
    comparison = Comparison((Side(path="a.gguf"), Side(path="b.gguf")), Settings())
    await start(comparison.runners[0].conversation.backend)
    code = "import json, os; print(json.dumps({'nice': os.getpriority(os.PRIO_PROCESS, 0)}))"
    nices.append(run_probe([sys.executable, "-c", code], lambda: False, 60)["nice"])
    print(*nices, os.getpriority(os.PRIO_PROCESS, 0))

asyncio.run(main())
"""


@pytest.mark.parametrize(("policy", "used"), [("bind:0", "bind:0"), ("bind:999", "local")])
async def test_a_worker_runs_under_its_policy_or_tells_that_it_was_refused(
    tmp_path: Path, policy: str, used: str
) -> None:
    async with in_use(await WorkerProcess.start(tmp_path, Launch(policy))) as worker:
        ready = await worker.events.get()
        assert isinstance(ready, WorkerReady) and ready.engine.pid == worker.pid
        assert ready.engine.memory_policy == used and ("999" in ready.engine.policy_refused) == (used != policy)


def placed(spec: PlacementSpec) -> Placement:
    """Place as asked: on one node every policy is resolved to none, and here they shall differ."""
    return Placement(own_cpus()[:1], parse_policy(spec.memory_policy), "", "")


async def test_another_policy_starts_the_worker_again_and_the_chat_goes_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "place_here", placed)
    async with in_use(LocalBackend(state_dir=tmp_path / "kv")) as backend:
        request = chat("hello there, this is a chat that has some text in it", state=StateKey(chat="one"))
        first = await collect(backend.load(tiny_model, LoadOptions(n_ctx=512), PlacementSpec(memory_policy="local")))
        assert isinstance(first.events[-1], ModelLoaded)
        before = backend.pid
        await collect(backend.generate(request))
        again = await collect(backend.load(tiny_model, LoadOptions(n_ctx=512), PlacementSpec(memory_policy="bind:0")))
        assert not any(isinstance(event, Failed) for event in again.events)
        assert backend.pid != before
        assert backend.engine.memory_policy == "bind:0"
        assert (await collect(backend.generate(request))).finished.timings.cache_n > 0
        same = backend.pid
        await collect(backend.load(tiny_model, LoadOptions(n_ctx=512), PlacementSpec(memory_policy="bind:0")))
        assert backend.pid == same


async def test_a_policy_that_makes_no_sense_here_is_a_failed_load(tiny_model: Path) -> None:
    async with in_use(LocalBackend()) as backend:
        failed = (await collect(backend.load(tiny_model, LoadOptions(), PlacementSpec(memory_policy="bind:77")))).failed
        assert failed.code == "usage"
        assert "77" in failed.message


@pytest.mark.parametrize("wanted", ["local", "bind:0"])
async def test_a_prepared_worker_loads_the_model_unless_its_policy_is_another_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    monkeypatch.setattr(local, "place_here", placed)
    before = children()
    async with in_use(LocalBackend(log_dir=tmp_path)) as backend:
        backend.prepare(PlacementSpec(memory_policy="local"))
        await collect(backend.load(tiny_model, LoadOptions(n_ctx=512), PlacementSpec(memory_policy=wanted)))
        assert backend.engine is not None and backend.engine.memory_policy == wanted
        assert children() - before == {backend.pid}
        assert len(list(tmp_path.glob("worker-*.log"))) == (1 if wanted == "local" else 2)


@pytest.mark.parametrize("memory", ["local", "bind:77"])
async def test_a_prepared_worker_that_nobody_needs_is_ended(tmp_path: Path, memory: str) -> None:
    """Also where it could not be started: the placement makes no sense here."""
    before = children()
    backend = LocalBackend(log_dir=tmp_path)
    backend.prepare(PlacementSpec(memory_policy=memory))
    await backend.close()
    assert children() <= before


def test_workers_are_not_as_nice_as_their_parent_became(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _NICE, str(tmp_path)], capture_output=True, text=True, check=True)
    before, chat, side, probe, own = map(int, done.stdout.split())
    assert before == chat == side == probe < own


async def test_a_worker_uses_one_cpu_module_and_another_setting_starts_it_again(tiny_model: Path) -> None:
    """An engine that was built for this CPU has none, and is used whatever the setting says."""
    modules = installed()
    async with in_use(LocalBackend()) as backend:
        loaded = await collect(backend.load(tiny_model, LoadOptions(n_ctx=512), ON_ONE_CPU))
        assert isinstance(loaded.events[-1], ModelLoaded)
        engine, before = backend.engine, backend.pid
        assert engine is not None and engine.module == next(iter(engine.modules), "")
        assert bool(engine.module) == bool(modules) and {*engine.modules} <= {*modules}
        other = next((name for name in reversed(engine.modules) if name != engine.module), "haswell")
        again = await collect(backend.load(tiny_model, LoadOptions(n_ctx=512, cpu_module=other), ON_ONE_CPU))
        assert isinstance(again.events[-1], ModelLoaded)
        assert backend.engine.module == (other if modules else "")
        assert (backend.pid != before) == bool(modules)
        assert (await collect(backend.generate(chat("hello")))).finished.timings.predicted_n
