"""Read bandwidth of sets of CPUs, measured in a process of its own (`read_probe`) and cached.

That of the cores in use is the denominator of utilization. A survey measures one core, one L3 group and all cores: it
tells the fabric link of an L3 group from the memory behind it. A cached entry belongs to a machine (its CPU, its
microcode, its memory, its NUMA nodes), to the cores that were measured and to the memory policy.
"""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, time
from typing import Any, Final, cast

import msgspec

from cpuchat.base import paths
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, Interrupted
from cpuchat.base.files import JsonCache
from cpuchat.base.processes import child_environment, python_command
from cpuchat.costs.measured_on import MeasuredOn
from cpuchat.hardware import sysfs
from cpuchat.hardware.lists import format_cpu_list, parse_cpu_list
from cpuchat.hardware.memory import available_bytes, meminfo
from cpuchat.hardware.numa.mempolicy import current, launch_command
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.sysfs import cpuinfo_values, read_text
from cpuchat.hardware.topology import Topology
from cpuchat.telemetry.machine import Peak
from cpuchat.telemetry.units import plural

ROOT = Path("/")
MAX_BYTES: Final = 3_900_000_000
"""Upper limit of the memory that a measurement takes, in bytes, unless caches are larger than half of it; it never
takes more than a quarter of the free memory."""

_HUGE_PAGE: Final = 2 << 20
_PLENTY: Final = 256 << 20
_ENOUGH: Final = 32 << 20
_FAR_BEYOND, _BEYOND = 8, 2
"""Size of the buffers of one L3 group in multiples of its L3: preferred, and minimum."""
PROBE_MODULE = "cpuchat.hardware.bandwidth.read_probe"
_POLL_SECONDS: Final = 0.05
_PATIENCE: Final = 45.0

WINDOW_SECONDS: Final = 0.1
"""Length of a window in seconds. The best of many short ones is the peak: what shares the memory with this system, a
host's other guests too, rarely leaves it alone for half a second, and decoding would come above the peak then."""
WINDOWS: Final = 15

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

    `cpus` are the logical CPUs that read, one thread each. `shares` are, for each round, the part of its CPU that the
    thread got which got least; () if not measured. `made` is when it was saved, in seconds since the epoch.
    """

    cpus: tuple[int, ...]
    bytes_per_s: float
    rounds: tuple[float, ...]
    shares: tuple[float, ...] = ()
    made: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Return whether other programs ran on these CPUs in every round, so that the result is too low."""
        return bool(self.shares) and max(self.shares) < _ALONE


def measure(
    cpus: Sequence[int],
    *,
    seconds: float = WINDOW_SECONDS,
    rounds: int = WINDOWS,
    policy: str = "",
    cancelled: Cancelled | None = None,
    root: Path = ROOT,
) -> ReadBandwidth:
    """Read memory with one pinned thread per CPU of `cpus`, `rounds` times for `seconds`. Blocks that long.

    `policy`: the memory policy, in the words of `mempolicy`; "" is that of this process. One that the kernel refuses
    is not in effect. `cancelled`: asked every 50 ms; True ends the measurement. Raises ProbeFailed: too little free
    memory, or a CPU that this process may not use; Interrupted: `cancelled` said so.
    """
    chosen = tuple(sorted(set(cpus)))
    if not chosen:
        raise ProbeFailed("No cores to measure.")
    command = [
        *python_command("-m", PROBE_MODULE),
        "--cpus", ",".join(map(str, chosen)),
        "--bytes", str(buffer_bytes(chosen, root)),
        "--seconds", f"{seconds:g}",
        "--rounds", str(rounds),
        "--library", str(paths.engine_library("cpuchat-read") or ""),
    ]  # fmt: skip
    if policy:
        command = launch_command(policy, command)
    found = run_probe(command, cancelled or (lambda: False), seconds * rounds + _PATIENCE)
    rates = tuple(float(rate) for rate in found.get("rounds", ()))
    if not rates or max(rates) <= 0:
        raise ProbeFailed("The measuring process returned no result.")
    return ReadBandwidth(chosen, max(rates), rates, tuple(float(share) for share in found.get("shares", ())))


def buffer_bytes(cpus: Sequence[int], root: Path = ROOT) -> int:
    """Return the buffer size for each of `cpus`: more than a cache holds. Raises ProbeFailed: too little memory."""
    wanted = _PLENTY
    needed = _ENOUGH
    groups = _l3_groups(cpus, root)
    for size, threads in groups:
        wanted = max(wanted, _FAR_BEYOND * size // threads)
        needed = max(needed, _BEYOND * size // threads)
    maximum = max(MAX_BYTES, _BEYOND * sum(size for size, _ in groups))
    needed = min(needed, maximum // len(cpus))  # Hundreds of cores: together they are beyond the caches with less each.
    allowed = min(maximum, available_bytes(root) // 4)
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


def run_probe(command: list[str], cancelled: Cancelled, limit: float) -> dict[str, Any]:
    """Run the measuring process and return what it prints. Raises ProbeFailed: it failed, was ended, or took longer
    than `limit` seconds; Interrupted: `cancelled` said so.
    """
    end = monotonic() + limit
    try:
        process = subprocess.Popen(
            command, env=child_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
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


def measured_on(cpus: Collection[int], words: str = "", root: Path = ROOT) -> MeasuredOn:
    """Return these CPUs of this machine, with several nodes under the memory policy `words` ("": of this process)."""
    nodes = read_text(root / "sys/devices/system/node/online")
    if len(parse_cpu_list(nodes)) < 2:
        words = ""
    elif not words and (policy := current()) is not None:
        words = policy.words
    machine = " | ".join(part.replace("|", "/") for part in (*_machine(root), f"nodes {nodes}"))
    return MeasuredOn(machine=machine, cpus=tuple(sorted(set(cpus))), memory_policy=words)


def _key(kind: str, cpus: Collection[int], words: str, root: Path) -> str:
    on = measured_on(cpus, words, root)
    return " | ".join((kind, format_cpu_list(on.cpus), on.memory_policy, on.machine))


def _machine(root: Path) -> tuple[str, ...]:
    values = cpuinfo_values(root)
    # Firmware and kernel take a little more or less of it from one start to the next.
    gigabytes = round(meminfo(root).get("MemTotal", 0) / 1e9)
    model = values.get("model name") or platform.processor() or platform.machine()
    return model, values.get("microcode", ""), f"{gigabytes} GB"


def _cache() -> JsonCache[Any]:
    return JsonCache(paths.bandwidth_file(), cast(type[Any], Any), version=2, max_entries=64)


RETRY_SECONDS: Final = 3600.0
"""Seconds for which a disturbed measurement counts before it is repeated: on a machine that is always busy, every load
would wait for another one.
"""


def peak_of(
    cpus: Sequence[int],
    policy: str = "",
    *,
    retry_after: float = RETRY_SECONDS,
    cancelled: Cancelled | None = None,
    failed: Callable[[str], None] | None = None,
    root: Path = ROOT,
) -> Peak | None:
    """Return the read bandwidth of these logical CPUs together; measured (2 seconds) unless it is cached. None when it
    was cancelled, or could not be measured.

    What was measured while other programs ran is measured again, but not within `retry_after` seconds, and the better
    of both counts. `policy`: the policy to measure under, resolved ("local", "interleave:0-1"); "" is that of
    this process. `cancelled`: asked every 50 ms; True ends the measurement. `failed`: gets the reason when there is no
    figure.
    """
    known = _saved(cpus, policy, root)
    if known is not None and not _is_due(known, retry_after):
        return _peak(known)
    try:
        measured = measure(cpus, policy=policy, cancelled=cancelled, root=root)
    except Interrupted:
        return None
    except CpuchatError as error:
        if failed is not None:
            failed(str(error))
        return None
    return remember(measured, policy, root=root)


def known_peak(cpus: Sequence[int], policy: str = "", *, root: Path = ROOT, disturbed: bool = True) -> Peak | None:
    """Return the cached measurement of these CPUs, if any; `disturbed` False: one without other programs running."""
    known = _saved(cpus, policy, root)
    return None if known is None or (known.disturbed and not disturbed) else _peak(known)


def should_measure(cpus: Sequence[int], policy: str = "", *, root: Path = ROOT) -> bool:
    """Return whether these CPUs were never measured, or only while disturbed and over an hour ago."""
    known = _saved(cpus, policy, root)
    return known is None or _is_due(known)


def _is_due(known: ReadBandwidth, retry_after: float = RETRY_SECONDS) -> bool:
    return known.disturbed and not 0 <= time() - known.made < retry_after


def _saved(cpus: Sequence[int], policy: str, root: Path) -> ReadBandwidth | None:
    saved = _cache().read().get(_key("peak", cpus, policy, root))
    with contextlib.suppress(msgspec.ValidationError):
        measured = msgspec.convert(saved, prepared(ReadBandwidth))
        if measured.bytes_per_s > 0 and measured.cpus == tuple(sorted(set(cpus))):
            return measured
    return None


def remember(measured: ReadBandwidth, policy: str = "", *, root: Path = ROOT) -> Peak:
    """Save a measurement as the peak of its CPUs, unless it was disturbed and more was measured before."""
    known = _saved(measured.cpus, policy, root) if measured.disturbed else None
    if known is not None and known.bytes_per_s > measured.bytes_per_s:
        if not known.disturbed:
            return _peak(known)
        measured = known
    _cache().put(_key("peak", measured.cpus, policy, root), replace(measured, made=time()))
    return _peak(measured)


def _peak(measured: ReadBandwidth) -> Peak:
    source = f"measured, {plural(len(measured.cpus), 'core')}"
    return Peak(measured.bytes_per_s, f"{source}, other programs ran" if measured.disturbed else source, measured.cpus)


Progress = Callable[[int, int, str], None]
"""(measurements done, measurements to do, what is measured next)"""


@dataclass(frozen=True, slots=True)
class Survey:
    """The read bandwidth of one core, of one whole L3 group, which reads through one fabric link, and of all cores.
    None: a machine has no such set.
    """

    one_core: ReadBandwidth
    all_cores: ReadBandwidth
    l3_group: ReadBandwidth | None = None


def survey(
    topology: Topology,
    on_progress: Progress | None = None,
    *,
    cpus: Sequence[int] = (),
    policy: str = "",
    cancelled: Cancelled | None = None,
    root: Path = ROOT,
) -> Survey:
    """Measure `cpus` (logical CPUs, one per core; none: those that compute by default), one of them, and those of one
    L3 group, in about 6 seconds. The result is cached. `policy`: the policy in the words of `mempolicy`; "" is that of
    this process. Raises ProbeFailed: they could not be measured; Interrupted: `cancelled` said so.
    """
    chosen = tuple(sorted(set(cpus))) or default_cpus(topology)
    group = tuple(max(topology.by_l3(chosen).values(), key=len, default=()))
    sets = {chosen: "all cores"}
    for members, what in ((chosen[:1], "1 core"), (group, "1 L3 group")):
        if members:
            sets.setdefault(members, what)
    found: dict[tuple[int, ...], ReadBandwidth] = {}
    for number, (members, what) in enumerate(sets.items()):
        if on_progress is not None:
            on_progress(number, len(sets), what)
        found[members] = measure(members, policy=policy, cancelled=cancelled, root=root)
    result = Survey(found[chosen[:1]], found[chosen], found.get(group))
    _cache().put(_key("survey", chosen, policy, root), result)
    remember(result.all_cores, policy, root=root)
    return result


def cached_survey(
    topology: Topology, *, cpus: Sequence[int] = (), policy: str = "", root: Path = ROOT
) -> Survey | None:
    """Return the cached survey of the same cores under the same memory policy; None if there is none."""
    saved = _cache().read().get(_key("survey", cpus or default_cpus(topology), policy, root))
    try:
        return msgspec.convert(saved, prepared(Survey))
    except msgspec.ValidationError:
        return None


def default_cpus(topology: Topology) -> tuple[int, ...]:
    """Return the cores that compute by default."""
    return choose_cores(topology).cpus
