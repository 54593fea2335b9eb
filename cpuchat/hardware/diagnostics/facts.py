"""Gathers everything about this machine that affects inference speed, for the checks."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import child_environment, python_command
from cpuchat.hardware.bandwidth.memory_modules import SMBIOS_TABLE, Module, Theoretical, read_modules, theoretical
from cpuchat.hardware.bandwidth.peaks import Survey, cached_survey, known_peak
from cpuchat.hardware.counters.base import CounterRefusal
from cpuchat.hardware.counters.ladder import counter_openers, open_best, power_openers
from cpuchat.hardware.counters.perf_events import Kernel
from cpuchat.hardware.memory import available_bytes, meminfo
from cpuchat.hardware.numa.launch import MEMORY_REFUSED, launch_command
from cpuchat.hardware.numa.mempolicy import choose_policy
from cpuchat.hardware.placement.cores import CoreChoice, choose_cores
from cpuchat.hardware.sysfs import read_number, read_text
from cpuchat.hardware.topology import ROOT, Topology, read_topology
from cpuchat.hardware.tuning.knobs import BALANCING, CPUS, THP, container, value_of
from cpuchat.protocol.model_info import EngineInfo
from cpuchat.telemetry.machine import Peak

_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class WantedSetup:
    """The machine settings as configured, and the model in use: its name and its size in bytes (0: none)."""

    cores: str = "auto"
    threads: int = 0
    memory: str = "auto"
    model: str = ""
    model_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DiagnosticFacts:
    """The machine at one moment; sizes in bytes. "" and None mean unknown or absent.

    `cores_error` and `policy_error` are why the settings cannot be applied, `policy_refused` is why the kernel rejects
    the memory policy. `governors` counts CPUs by frequency governor, `driver` is the frequency driver. `load` is the
    load average of the last minute. `counter` and `power` name the sources that open, the refusals say why better ones
    do not. `engine_error` is why there is no engine, `engine_fix` what its error says to do.
    """

    topology: Topology
    settings: WantedSetup = WantedSetup()
    choice: CoreChoice | None = None
    cores_error: str = ""
    policy: str = ""
    policy_reason: str = ""
    policy_error: str = ""
    policy_refused: str = ""
    available: int = 0
    swap_total: int = 0
    swap_used: int = 0
    load: float | None = None
    container: str = ""
    modules: tuple[Module, ...] = ()
    theoretical: Theoretical | None = None
    survey: Survey | None = None
    peak: Peak | None = None
    governors: tuple[tuple[str, int], ...] = ()
    driver: str = ""
    boost: bool | None = None
    thp: str = ""
    balancing: int | None = None
    counter: str = ""
    counter_refusals: tuple[CounterRefusal, ...] = ()
    power: str = ""
    power_refusals: tuple[CounterRefusal, ...] = ()
    engine: EngineInfo | None = None
    engine_error: str = ""
    engine_fix: str = ""


def refused_policy(words: str) -> str:
    """Try a memory policy in a process of its own; returns why the kernel rejects it, "" when it does not."""
    code = f"import os; print(os.environ.get({MEMORY_REFUSED!r}, ''))"
    try:
        command = launch_command(words, python_command("-c", code))
        done = subprocess.run(
            command, env=child_environment(), capture_output=True, text=True, timeout=_PATIENCE_SECONDS
        )
    except (OSError, subprocess.SubprocessError, CpuchatError) as error:
        return str(error)
    return done.stdout.strip()


def gather_facts(
    settings: WantedSetup,
    *,
    engine: EngineInfo | None = None,
    engine_error: str = "",
    engine_fix: str = "",
    topology: Topology | None = None,
    kernel: Kernel | None = None,
    pid: int | None = None,
    refused: Callable[[str], str] = refused_policy,
    root: Path = ROOT,
) -> DiagnosticFacts:
    """Read what can be read, without measuring anything. Never raises for what is unknown.

    Args:
        pid: a process of this user, to see whether counters of a single process open.
        kernel: replaces the kernel's calls in tests, as `refused` does for memory policies.
    """
    topology = topology or read_topology(root)
    setup = _setup(topology, settings, refused)
    cpus = setup["choice"].cpus if setup["choice"] is not None else ()
    limit = theoretical(topology, root)
    return DiagnosticFacts(
        topology=topology,
        settings=settings,
        load=_load(root),
        container=container(root),
        modules=tuple(read_modules(root / SMBIOS_TABLE)),
        theoretical=limit,
        survey=cached_survey(topology, cpus=cpus, root=root),
        peak=known_peak(cpus, setup["policy"], root=root) if cpus else None,
        engine=engine,
        engine_error=engine_error,
        engine_fix=engine_fix,
        **setup,
        **_memory(root),
        **_frequencies(topology, root),
        **_counters(topology, pid, root, kernel, limit.bytes_per_s if limit is not None else None),
    )


def _setup(topology: Topology, settings: WantedSetup, refused: Callable[[str], str]) -> dict[str, Any]:
    """Return the cores and the memory policy that the settings mean on this machine, or why they cannot be used."""
    found: dict[str, Any] = {"choice": None, "policy": ""}
    try:
        found["choice"] = choose_cores(topology, settings.cores, settings.threads)
    except CpuchatError as error:
        found["cores_error"] = str(error)
    try:
        cpus = found["choice"].cpus if found["choice"] is not None else ()
        policy, found["policy_reason"] = choose_policy(topology, settings.memory, cpus)
        found["policy"] = policy.words
        found["policy_refused"] = refused(policy.words) if policy.places else ""
    except CpuchatError as error:
        found["policy_error"] = str(error)
    return found


def _memory(root: Path) -> dict[str, Any]:
    info = meminfo(root)
    return {
        "available": available_bytes(root),
        "swap_total": info.get("SwapTotal", 0),
        "swap_used": max(info.get("SwapTotal", 0) - info.get("SwapFree", 0), 0),
        "thp": value_of(root, f"{THP}/enabled"),
        "balancing": read_number(root / BALANCING.lstrip("/")),
    }


def _frequencies(topology: Topology, root: Path) -> dict[str, Any]:
    governors = Counter(value_of(root, f"{CPUS}/cpu{cpu}/cpufreq/scaling_governor") for cpu in topology.online)
    return {
        "governors": tuple((value, n) for value, n in governors.most_common() if value),
        "driver": value_of(root, f"{CPUS}/cpu{topology.online[0]}/cpufreq/scaling_driver") if topology.online else "",
        "boost": _boost(root),
    }


def _counters(
    topology: Topology, pid: int | None, root: Path, kernel: Kernel | None, theoretical: float | None
) -> dict[str, Any]:
    """Return names of the counters that open, and why better ones do not; each is closed again."""
    openers = counter_openers(topology, pid, root, kernel=kernel, theoretical=theoretical)
    counter, counter_refusals = open_best(openers)
    power, power_refusals = open_best(power_openers(topology, root, kernel=kernel))
    names = [source.name if source is not None else "" for source in (counter, power)]
    for source in (counter, power):
        if source is not None:
            source.close()
    return {
        "counter": names[0],
        "counter_refusals": counter_refusals,
        "power": names[1],
        "power_refusals": power_refusals,
    }


def _load(root: Path) -> float | None:
    """Return the first figure of /proc/loadavg (proc(5)); None where there is none."""
    try:
        return float(read_text(root / "proc/loadavg").split(" ")[0])
    except ValueError:
        return None


def _boost(root: Path) -> bool | None:
    on = read_number(root / f"{CPUS}/cpufreq/boost".lstrip("/"))
    if on is not None:
        return on != 0
    off = read_number(root / f"{CPUS}/intel_pstate/no_turbo".lstrip("/"))
    return None if off is None else off == 0
