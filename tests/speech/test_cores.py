from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from cpuchat.hardware.topology import Core, Topology, read_topology
from cpuchat.speech.speaker import beside, beside_model
from tests.support.scripted_backend import MODEL


def machine(cores: int, *, smt: bool = False, allowed: tuple[int, ...] = ()) -> Topology:
    """A machine of so many cores, with its second hyper-threads after all the first ones."""
    every = [Core(n, (n, n + cores) if smt else (n,), 0, 0, None) for n in range(cores)]
    online = tuple(sorted(cpu for core in every for cpu in core.cpus))
    return replace(read_topology(), cores=tuple(every), online=online, allowed=allowed or online)


def test_cores_that_the_model_leaves_free_are_taken() -> None:
    assert beside(machine(8), "auto", range(6)) == ((6, 7), False)
    assert beside(machine(8), "auto", range(2)) == ((6, 7), False)
    assert beside(machine(4, smt=True), "auto", (0, 1, 2)) == ((3, 7), False)


def test_hyper_threads_come_next() -> None:
    assert beside(machine(4, smt=True), "auto", range(4)) == ((6, 7), False)


def test_where_everything_computes_the_scheduler_chooses() -> None:
    assert beside(machine(2), "auto", (0, 1)) == ((), True)


@pytest.mark.parametrize(
    ("server", "cpus"), [("http://127.0.0.1:8080", ((), True)), ("http://10.0.0.2:8080", ((6, 7), False))]
)
def test_a_server_on_this_machine_may_compute_anywhere(server: str, cpus: tuple[tuple[int, ...], bool]) -> None:
    assert beside_model(machine(8), "auto", msgspec.structs.replace(MODEL, path=f"{server}#name")) == cpus


def test_cpus_of_the_settings_are_used_where_this_process_may() -> None:
    assert beside(machine(8), "0,1", range(8)) == ((0, 1), True)
    assert beside(machine(8, allowed=(0, 1, 2)), "2-5", (0, 1)) == ((2,), False)


@pytest.mark.parametrize("cores", [1, 2, 96])
def test_without_a_model_there_is_room(cores: int) -> None:
    cpus, shared = beside(machine(cores), "auto", ())
    assert cpus and not shared
