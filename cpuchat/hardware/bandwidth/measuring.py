"""Measures the read bandwidth of a set of CPUs, in a separate process (`read_probe`).

Caches the measured bandwidths of this machine, so that they are measured once.

An entry belongs to a machine (its CPU, its microcode, its memory, its NUMA nodes) and to the cores that were measured.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final, cast

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, Interrupted
from cpuchat.base.files import JsonCache
from cpuchat.base.processes import child_environment, python_command
from cpuchat.hardware import sysfs
from cpuchat.hardware.lists import format_cpu_list, parse_cpu_list
from cpuchat.hardware.memory import available_bytes, meminfo
from cpuchat.hardware.sysfs import cpuinfo_values, read_text
from cpuchat.telemetry.units import plural

ROOT = Path("/")
MOST_BYTES: Final = 3_900_000_000
"""Upper limit of the memory that a measurement takes, in bytes; it never takes more than a quarter of the free memory.
"""

_HUGE_PAGE: Final = 2 << 20
_PLENTY: Final = 256 << 20
_ENOUGH: Final = 32 << 20
_FAR_BEYOND, _BEYOND = 8, 2
"""Size of the buffers of one L3 group in multiples of its L3: preferred, and minimum."""
_MODULE = "cpuchat.hardware.bandwidth.read_probe"
_OPTIONS: list[str] = []  # further options of the probe, for tests
_POLL_SECONDS: Final = 0.05
_PATIENCE: Final = 45.0
_MEMORY_REFUSED: Final = "CPUCHAT_MEMORY_REFUSED"

Cancelled = Callable[[], bool]


class ProbeFailed(CpuchatError, code="probe_failed", exit_code=14):
    """The read bandwidth could not be measured; the message says why."""


_ALONE: Final = 0.9
"""Share of its CPU from which a thread counts as undisturbed. The app itself takes 2 to 5 % of a core while a model is
loaded; another program that computes takes half of one.
"""


@dataclass(frozen=True, slots=True)
class ReadBandwidth:
    """Read bandwidth in bytes per second: of each round, and the best of them.

    `cpus` are the logical CPUs that read, one thread each; `node` is the NUMA node that the memory was bound to (None:
    wherever the memory policy of this process puts it). `shares` are, for each round, the part of its CPU that the
    thread got which got least; () if not measured. `made` is when it was saved, in seconds since the epoch.
    """

    cpus: tuple[int, ...]
    bytes_per_s: float
    rounds: tuple[float, ...]
    node: int | None = None
    shares: tuple[float, ...] = ()
    made: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Return whether other programs ran on these CPUs in every round, so that the result is too low."""
        return bool(self.shares) and max(self.shares) < _ALONE


def measure(
    cpus: Sequence[int],
    *,
    seconds: float = 0.5,
    rounds: int = 3,
    node: int | None = None,
    memory: str = "",
    cancelled: Cancelled | None = None,
    root: Path = ROOT,
) -> ReadBandwidth:
    """Read memory with one pinned thread per CPU of `cpus`, `rounds` times for `seconds`. Blocks that long.

    Args:
        node: bind the memory to this NUMA node.
        memory: the memory policy, in the words of `mempolicy`; "" is that of this process.
        cancelled: asked every 50 ms; True ends the measurement.

    Raises:
        ProbeFailed: too little free memory, a CPU that this process may not use, or a node that may not be used.
        Interrupted: `cancelled` said so.
    """
    chosen = tuple(sorted(set(cpus)))
    if not chosen:
        raise ProbeFailed("No cores to measure.")
    command = [
        *python_command("-m", _MODULE), *_OPTIONS,
        "--cpus", ",".join(map(str, chosen)),
        "--bytes", str(buffer_bytes(chosen, root)),
        "--seconds", f"{seconds:g}",
        "--rounds", str(rounds),
    ]  # fmt: skip
    words = memory if node is None else f"bind:{node}"
    if words:
        from cpuchat.hardware.numa.launch import launch_command

        command = launch_command(words, command)
    found = _run(command, cancelled or (lambda: False), seconds * rounds + _PATIENCE)
    refused = found.get("memory_refused")
    if node is not None and refused:
        raise ProbeFailed(f"Cannot bind memory to node {node}: {refused}")
    rates = tuple(float(rate) for rate in found.get("rounds", ()))
    if not rates or max(rates) <= 0:
        raise ProbeFailed("The measuring process returned no result.")
    return ReadBandwidth(chosen, max(rates), rates, node, tuple(float(share) for share in found.get("shares", ())))


def buffer_bytes(cpus: Sequence[int], root: Path = ROOT) -> int:
    """Return the buffer size for each of `cpus` in bytes: so large that no cache holds it.

    Raises:
        ProbeFailed: there is not enough free memory for that.
    """
    wanted = _PLENTY
    needed = _ENOUGH
    for size, threads in _l3_groups(cpus, root):
        wanted = max(wanted, _FAR_BEYOND * size // threads)
        needed = max(needed, _BEYOND * size // threads)
    if needed * len(cpus) > MOST_BYTES:  # Hundreds of cores: together they are beyond the caches with less each.
        needed = MOST_BYTES // len(cpus)
    allowed = min(MOST_BYTES, available_bytes(root) // 4)
    if needed * len(cpus) > allowed:
        raise ProbeFailed(
            f"Measuring {plural(len(cpus), 'core')} needs {needed * len(cpus) * 4 / 1e9:.1f} GB of free memory, "
            f"{allowed * 4 / 1e9:.1f} GB are free.",
            "Close other programs, or measure fewer cores.",
        )
    return max(min(wanted, allowed // len(cpus)) // _HUGE_PAGE, 1) * _HUGE_PAGE


def _l3_groups(cpus: Sequence[int], root: Path) -> list[tuple[int, int]]:
    """(size of the last-level cache in bytes, how many of `cpus` share it) of each such cache."""
    groups: list[tuple[int, int]] = []
    seen: set[int] = set()
    for cpu in cpus:
        if cpu in seen:
            continue
        caches = sysfs.caches(root, cpu)
        shared = set(caches[-1].cpus) & set(cpus) if caches else {cpu}
        seen |= shared | {cpu}
        if caches:
            groups.append((caches[-1].size, max(len(shared), 1)))
    return groups


def _run(command: list[str], cancelled: Cancelled, limit: float) -> dict[str, Any]:
    """Run the measuring process and return what it prints.

    Raises:
        ProbeFailed: it failed, was ended, or took longer than `limit` seconds.
        Interrupted: `cancelled` said so.
    """
    environment = child_environment()
    environment.pop(_MEMORY_REFUSED, None)
    end = monotonic() + limit
    try:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise ProbeFailed(f"Cannot start the measuring process: {error.strerror}.") from None
    with process:
        try:
            while True:
                if cancelled():
                    raise Interrupted("Measurement cancelled.")
                try:
                    output, errors = process.communicate(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    if monotonic() > end:
                        raise ProbeFailed(f"The measurement timed out after {limit:.0f} seconds.") from None
        finally:
            if process.poll() is None:
                process.kill()
    return _parsed(output, errors, process.returncode)


def _parsed(output: bytes, errors: bytes, status: int) -> dict[str, Any]:
    try:
        found = json.loads(output)
    except ValueError:
        found = None
    if isinstance(found, dict) and status == 0:
        return found
    if isinstance(found, dict) and found.get("error"):
        raise ProbeFailed(f"The measurement failed: {found['error']}.", "Choose other or fewer cores.")
    if status < 0:
        why = f"was killed by signal {-status}"
    else:
        lines = errors.decode(errors="replace").strip().splitlines()
        why = f"failed: {lines[-1][:200]}" if lines else f"failed with status {status}"
    raise ProbeFailed(f"The measuring process {why}.", "It is probably out of memory: close other programs.")


def key(kind: str, cpus: Collection[int], words: str = "", root: Path = ROOT) -> str:
    """Return the cache key of a `kind` of figure: this machine, these CPUs and, with several nodes, a memory policy."""
    nodes = read_text(root / "sys/devices/system/node/online")
    if len(parse_cpu_list(nodes)) < 2:
        words = ""
    parts = [kind, format_cpu_list(cpus), words, *_machine(root), f"nodes {nodes}"]
    return " | ".join(part.replace("|", "/") for part in parts)


def _machine(root: Path) -> tuple[str, ...]:
    values = cpuinfo_values(root)
    # Firmware and kernel take a little more or less of it from one start to the next.
    gigabytes = round(meminfo(root).get("MemTotal", 0) / 1e9)
    model = values.get("model name") or platform.processor() or platform.machine()
    return model, values.get("microcode", ""), f"{gigabytes} GB"


def load(name: str) -> Any:
    """Return the decoded JSON entry `name`; None if there is none."""
    return _cache().read().get(name)


def store(name: str, value: Any) -> None:
    """Cache `value` (whatever msgspec can encode) under `name`."""
    _cache().put(name, value)


def _cache() -> JsonCache[Any]:
    return JsonCache(paths.bandwidth_file(), cast(type[Any], Any), version=1, max_entries=64)
