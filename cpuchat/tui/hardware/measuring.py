"""Reads and measures for the hardware screen: the read bandwidth, and what passes cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from cpuchat.bench.cost_probe import CostProbe, probe_costs
from cpuchat.daemon_thread import run_in_daemon_thread
from cpuchat.errors import CpuchatError, Interrupted
from cpuchat.present.machine import costs_measured

if TYPE_CHECKING:
    from pathlib import Path

    from cpuchat.hardware.bandwidth.survey import Survey
    from cpuchat.hardware.machine_reader import MachineFacts, MachineReader
    from cpuchat.hardware.placement.placement import Placement, PlacementSpec
    from cpuchat.model_info import ModelInfo
    from cpuchat.tui.services import Services
    from cpuchat.tune.placements import LoadedCosts

_POLL_SECONDS = 0.1


async def read_costs(services: Services, model: ModelInfo | None, root: Path) -> tuple[LoadedCosts | None, str]:
    """Return what passes of the loaded `model` cost, and the row about passes on the cores of the settings."""
    from cpuchat.present.machine import passes_measured
    from cpuchat.tune.placements import loaded_costs

    settings, engine = services.settings, services.conversation.backend.engine
    memory = engine.memory if engine is not None else ""

    def read() -> tuple[LoadedCosts | None, str]:
        costs = loaded_costs(model, memory, root) if model is not None else None
        return costs, passes_measured(settings, root)

    return await run_in_daemon_thread(read)


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
        return survey, costs_measured(None, 0)
    probe = CostProbe(spec, progress)
    running = asyncio.ensure_future(probe_costs(probe, meant, survey.all_cores.bytes_per_s))
    while not running.done():
        await asyncio.wait({running}, timeout=_POLL_SECONDS)
        if cancelled.is_set() and not running.done():
            probe.stop()
    try:
        return survey, costs_measured(running.result(), len(meant.cpus))
    except Interrupted:
        return survey, ""
    except CpuchatError as error:
        return survey, f"Passes not measured: {error}"
