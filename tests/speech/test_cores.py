from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pytest

from cpuchat.hardware.topology import Core, Topology, read_topology
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.speech.speaker import cpus_beside
from tests.support.scripted_backend import MODEL


def machine(cores: int, *, smt: bool = False, allowed: tuple[int, ...] = ()) -> Topology:
    """A machine of so many cores, with its second hyper-threads after all the first ones."""
    every = [Core(n, (n, n + cores) if smt else (n,), 0, 0, None) for n in range(cores)]
    online = tuple(sorted(cpu for core in every for cpu in core.cpus))
    return replace(read_topology(), cores=tuple(every), online=online, allowed=allowed or online)


def computing(cpus: Iterable[int]) -> ModelInfo:
    return msgspec.structs.replace(MODEL, path="/m/model.gguf", cpus=tuple(cpus), draft_cpus=())


def test_cores_that_the_model_leaves_free_are_taken() -> None:
    assert cpus_beside(machine(8), "auto", computing(range(6))) == ((6, 7), False)
    assert cpus_beside(machine(8), "auto", computing(range(2))) == ((6, 7), False)
    assert cpus_beside(machine(4, smt=True), "auto", computing((0, 1, 2))) == ((3, 7), False)


def test_hyper_threads_come_next() -> None:
    assert cpus_beside(machine(4, smt=True), "auto", computing(range(4))) == ((6, 7), False)


def test_where_everything_computes_the_scheduler_chooses() -> None:
    assert cpus_beside(machine(2), "auto", computing((0, 1))) == ((), True)


@pytest.mark.parametrize(
    ("server", "cpus"), [("http://127.0.0.1:8080", ((), True)), ("http://10.0.0.2:8080", ((6, 7), False))]
)
def test_a_server_on_this_machine_may_compute_anywhere(server: str, cpus: tuple[tuple[int, ...], bool]) -> None:
    assert cpus_beside(machine(8), "auto", msgspec.structs.replace(MODEL, path=f"{server}#name")) == cpus


def test_cpus_of_the_settings_are_used_where_this_process_may() -> None:
    assert cpus_beside(machine(8), "0,1", computing(range(8))) == ((0, 1), True)
    assert cpus_beside(machine(8, allowed=(0, 1, 2)), "2-5", computing((0, 1))) == ((2,), False)


@pytest.mark.parametrize("cores", [1, 2, 96])
def test_without_a_model_there_is_room(cores: int) -> None:
    cpus, shared = cpus_beside(machine(cores), "auto", None)
    assert cpus and not shared
