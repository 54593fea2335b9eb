"""Measures for the hardware screen: the read bandwidth, and what passes cost on the cores in use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from cpuchat.bench.cost_probe import CostProbe, probe_costs
from cpuchat.errors import CpuchatError, Interrupted
from cpuchat.present.machine import costs_measured

if TYPE_CHECKING:
    from cpuchat.hardware.bandwidth.survey import Survey
    from cpuchat.hardware.machine_reader import MachineFacts, MachineReader
    from cpuchat.hardware.placement.placement import Placement, PlacementSpec

_POLL_SECONDS = 0.1


async def measure_machine(
    reader: MachineReader,
    facts: MachineFacts,
    spec: PlacementSpec,
    meant: Placement | None,
    progress: Callable[[int, int, str], None],
    cancelled: threading.Event,
) -> tuple[Survey, str]:
    """Return the survey, and a sentence about the passes ("" where these were cancelled).

    Args:
        spec: the cores in use; `meant` is what it resolves to here, None if it is impossible.

    Raises:
        ProbeFailed, OSError: the bandwidth could not be measured.
        Interrupted: cancelled during the survey.
    """
    # As the worker places its memory: on one node there is nothing to place.
    memory = meant.memory.words if meant is not None and len(facts.topology.nodes) > 1 else ""
    survey = await asyncio.to_thread(reader.survey, facts.topology, memory, progress, cancelled.is_set)
    if meant is None or survey.all_cores.disturbed:
        return survey, costs_measured(None)
    probe = CostProbe(spec, progress)
    running = asyncio.ensure_future(probe_costs(probe, meant, survey.all_cores.bytes_per_s))
    while not running.done():
        await asyncio.wait({running}, timeout=_POLL_SECONDS)
        if cancelled.is_set() and not running.done():
            probe.stop()
    try:
        return survey, costs_measured(running.result())
    except Interrupted:
        return survey, ""
    except CpuchatError as error:
        return survey, f"Passes not measured: {error}"
