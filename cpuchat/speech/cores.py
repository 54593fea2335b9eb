"""Chooses the CPUs of the speech process beside a model that computes."""

from __future__ import annotations

from collections.abc import Collection

from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.topology import Topology
from cpuchat.model_info import ModelInfo
from cpuchat.servers import computes_here

MOST_CORES = 2
"""piper computes with as many threads as it has CPUs; one core is enough for either engine."""


def speech_cpus(topology: Topology, computing: Collection[int]) -> tuple[int, ...]:
    """Return the CPUs of cores that compute nothing, the last ones, else SMT siblings of those that do.

    () where every CPU computes: then the scheduler chooses, because a fixed CPU would hold back the same thread always.
    """
    allowed, busy = set(topology.allowed), set(computing)
    idle = [core.cpus for core in topology.allowed_cores if busy.isdisjoint(core.cpus)]
    if idle:
        return tuple(sorted(cpu for cpus in idle[-MOST_CORES:] for cpu in cpus if cpu in allowed))
    return tuple(sorted(allowed - busy))[-MOST_CORES:]


def beside_model(topology: Topology, cores: str, model: ModelInfo | None) -> tuple[tuple[int, ...], bool]:
    """Return the same as `beside`. A server on this machine may compute on every CPU: it does not say on which."""
    if model is None:
        return beside(topology, cores, ())
    return beside(topology, cores, topology.allowed if computes_here(model.path) else model.compute_cpus)


def beside(topology: Topology, cores: str, computing: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """Return the CPUs for `cores` of the settings beside a model that computes on `computing`, and whether the model
    computes on all of them too. Those that this process may not use are left out.
    """
    if cores == "auto":
        cpus = speech_cpus(topology, computing)
    else:
        cpus = tuple(cpu for cpu in parse_cpu_list(cores) if cpu in topology.allowed)
    return cpus, bool(computing) and set(cpus or topology.allowed) <= set(computing)
