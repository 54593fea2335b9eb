"""The read bandwidth of cores: measured in a process of its own (`read_probe`), kept, and raised by what reads more.

It is the denominator of utilization and the basis of limits and predictions. A measurement beside other programs can
only be too low: then the best one counts, as "at least", until one alone succeeds, or the estimate if that is higher.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, Interrupted
from cpuchat.base.files import file_lock, is_locked
from cpuchat.base.processes import child_environment, exit_reason, python_command, starter
from cpuchat.hardware import sysfs
from cpuchat.hardware.bandwidth.theoretical import usual_read
from cpuchat.hardware.memory import available_bytes
from cpuchat.hardware.numa.mempolicy import launch_command
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import ROOT, Topology, read_topology
from cpuchat.measure import store
from cpuchat.measure.subject import Subject, on_cores
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.telemetry.machine import Peak, Peaks
from cpuchat.telemetry.units import plural

WHAT: Final = "read bandwidth"
_WINDOWS: Final = "windows of read bandwidth"
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
_BESIDE: Final = " beside other programs: a lower bound, and no passes"
WINDOW_SECONDS: Final = 0.1
"""Length of a window in seconds. The best of many short ones is the peak: what shares the memory with this system, a
host's other guests too, rarely leaves it alone for half a second, and decoding would come above the peak then."""
WINDOWS, SLICE = 15, 3
"""Windows of a measurement, and of a slice of one: with its process and the filling of memory, a slice takes under a
second."""
_ALONE: Final = 0.9
"""Share of its CPU from which a thread counts as undisturbed. The app itself takes 2 to 5 % of a core while a model is
loaded; another program that computes takes half of one."""

Cancelled = Callable[[], bool]
Progress = Callable[[int, int, str], None]
"""(measurements done, measurements to do, what is measured next)"""


class ProbeFailed(CpuchatError, code="probe_failed", exit_code=14):
    """The read bandwidth could not be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class ReadBandwidth:
    """A measurement in bytes per second: of each round, and the best of them.

    `cpus` are the logical CPUs that read, one thread each. `shares` are, for each round, the part of its CPU that the
    thread got which got least; () if not measured."""

    cpus: tuple[int, ...]
    bytes_per_s: float
    rounds: tuple[float, ...]
    shares: tuple[float, ...] = ()

    @property
    def disturbed(self) -> bool:
        """Return whether other programs ran on these CPUs in every round, so that the result is too low."""
        return bool(self.shares) and max(self.shares) < _ALONE


def known(cpus: Collection[int], policy: str = "", *, root: Path = ROOT) -> Peak | None:
    """Return what is known of these CPUs together, if anything; with several nodes under a memory policy, in the words
    of `mempolicy` ("": that of this process)."""
    found = store.find(on_cores(cpus, policy, root), WHAT, float) if cpus else None
    if found is None or not found.value > 0:
        return None
    best = max(found.value, _of_some(found.subject)) if found.disturbed else found.value
    part = store.find(found.subject, _WINDOWS, tuple[float, ...]) if found.disturbed else None
    return Peak(best, found.subject.cores, found.disturbed, unfinished=part is not None and not part.disturbed)


def _of_some(on: Subject) -> float:
    """Return the most that was measured of some of these cores: all of them read at least as much."""
    some = (one for one in store.find_all(WHAT, float) if set(one.subject.cores) < set(on.cores))
    return max((one.value for one in some if msgspec.structs.replace(one.subject, cores=on.cores) == on), default=0.0)


def expected(cpus: Collection[int], policy: str = "", *, root: Path = ROOT) -> Peak | None:
    """Return what is `known` of these CPUs, or an estimate where that is more than the least that is known; None
    without any. Utilization, limits and predictions rest on it."""
    found = known(cpus, policy, root=root)
    if not cpus or (found is not None and (found.unfinished or not found.at_least)):
        return found
    on, usual = on_cores(cpus, policy, root), usual_read(read_topology(root), cpus)
    least = max(found.bytes_per_s if found is not None else 0.0, of_some := _of_some(on))
    if found is not None and found.bytes_per_s >= usual:
        return found
    return Peak(max(usual, of_some), on.cores, estimated=True, least=least)


def with_peak(model: ModelInfo, policy: str) -> ModelInfo:
    """Return a loaded model with what is `expected` of the cores that compute."""
    peak = expected(model.cpus, policy)
    if peak is None:
        return model
    read, least, estimated = peak.bytes_per_s, peak.at_least, peak.estimated
    return msgspec.structs.replace(model, peak_read=read, peak_at_least=least, peak_estimated=estimated)


def keep(found: ReadBandwidth, policy: str = "", *, root: Path = ROOT) -> Peak:
    """Keep a measurement, unless it was disturbed and more is known; returns what is known then."""
    before = known(found.cpus, policy, root=root)
    if found.disturbed and before is not None and before.bytes_per_s >= found.bytes_per_s:
        return before
    on = on_cores(found.cpus, policy, root)
    store.keep(on, WHAT, found.bytes_per_s, n=len(found.rounds), disturbed=found.disturbed)
    return Peak(found.bytes_per_s, on.cores, found.disturbed)


def keep_slice(found: ReadBandwidth, policy: str = "", *, root: Path = ROOT) -> None:
    """Keep a part of a measurement with those before it. Until so many windows were undisturbed as a measurement has,
    the best of all is the least, unless a whole measurement is known; then those are one measurement."""
    on = on_cores(found.cpus, policy, root)
    before = store.find(on, _WINDOWS, tuple[float, ...])
    alone = [rate for rate, share in zip(found.rounds, found.shares, strict=False) if share >= _ALONE]
    windows = (*(before.value if before is not None else ()), *alone)
    if len(windows) < WINDOWS:
        disturbed = len(alone) < len(found.rounds) or (before is not None and before.disturbed)
        store.keep(on, _WINDOWS, windows, n=len(windows), disturbed=disturbed)
        if (whole := known(found.cpus, policy, root=root)) is None or whole.at_least:
            keep(replace(found, shares=(0.0,)), policy, root=root)
        return
    store.forget(on, _WINDOWS)
    keep(ReadBandwidth(found.cpus, max(windows), windows, (1.0,) * len(windows)), policy, root=root)


@contextlib.contextmanager
def one_at_a_time(patience: float = 0.0) -> Iterator[bool]:
    """Keep other processes from measuring meanwhile; False where one still does after `patience` seconds."""
    file = paths.cache_dir() / "measuring.lock"
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
    end = monotonic() + patience
    while (is_taken := is_locked(file)) and monotonic() < end:
        sleep(_POLL_SECONDS)
    if is_taken:
        yield False
    else:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(file_lock(file))
            yield True


def raise_to(peak: Peak, policy: str = "", *, root: Path = ROOT) -> None:
    """Keep what a pass read, which is more than what is known."""
    store.keep(on_cores(peak.cpus, policy, root), WHAT, peak.bytes_per_s, n=0, disturbed=True)


def measure(
    cpus: Sequence[int],
    *,
    seconds: float = WINDOW_SECONDS,
    rounds: int = WINDOWS,
    policy: str = "",
    cancelled: Cancelled = lambda: False,
    root: Path = ROOT,
) -> ReadBandwidth:
    """Read memory with one pinned thread per CPU of `cpus`, `rounds` times for `seconds`. Blocks that long.

    `policy`: one that the kernel refuses is not in effect. `cancelled`: asked every 50 ms; True ends the measurement.
    Raises ProbeFailed: too little memory is free, or a CPU may not be used; Interrupted: `cancelled` said so."""
    chosen = tuple(sorted(set(cpus)))
    if not chosen:
        raise ProbeFailed("No cores to measure.")
    if (library := paths.engine_library("cpuchat-read")) is None:
        raise ProbeFailed("This engine was built without cpuchat's reader of memory.", "Reinstall the engine.")
    what = json.dumps([str(library), chosen, buffer_bytes(chosen, root), seconds, rounds])
    command = [*python_command("-m", PROBE_MODULE), what]
    if policy:
        command = launch_command(policy, command)
    found = run_probe(command, cancelled, seconds * rounds + _PATIENCE)
    rates = tuple(float(rate) for rate in found.get("rounds", ()))
    if not rates or max(rates) <= 0:
        raise ProbeFailed("Other programs left the cores no time to read memory.", "Measure again when they are done.")
    return ReadBandwidth(chosen, max(rates), rates, tuple(float(share) for share in found.get("shares", ())))


def buffer_bytes(cpus: Sequence[int], root: Path = ROOT) -> int:
    """Return the buffer size for each of `cpus`: more than a cache holds. Raises ProbeFailed: too little memory."""
    wanted, needed, beyond = _PLENTY, _ENOUGH, 0
    seen: set[int] = set()
    for cpu in cpus:
        if cpu in seen or not (caches := sysfs.caches(root, cpu)):
            continue
        shared = set(caches[-1].cpus) & set(cpus) or {cpu}
        seen |= shared | {cpu}
        beyond += _BEYOND * caches[-1].size
        wanted = max(wanted, _FAR_BEYOND * caches[-1].size // len(shared))
        needed = max(needed, _BEYOND * caches[-1].size // len(shared))
    maximum = max(MAX_BYTES, beyond)
    needed = min(needed, maximum // len(cpus))  # Hundreds of cores: together they are beyond the caches with less each.
    allowed = min(maximum, available_bytes(root) // 4)
    if needed * len(cpus) > allowed:
        raise ProbeFailed(
            f"Measuring {plural(len(cpus), 'core')} needs {needed * len(cpus) * 4 / 1e9:.1f} GB of free memory, "
            f"{allowed * 4 / 1e9:.1f} GB are free.",
            "Close other programs, or measure fewer cores.",
        )
    return max(min(wanted, allowed // len(cpus)) // _HUGE_PAGE, 1) * _HUGE_PAGE


def run_probe(command: list[str], cancelled: Cancelled, limit: float) -> dict[str, Any]:
    """Run the measuring process and return what it prints. Raises ProbeFailed: it failed, was ended, or took longer
    than `limit` seconds; Interrupted: `cancelled` said so."""
    end = monotonic() + limit
    try:
        none, pipe = subprocess.DEVNULL, subprocess.PIPE
        start = starter().submit(
            subprocess.Popen, command, env=child_environment(), stdin=none, stdout=pipe, stderr=pipe
        )
        process = start.result()
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
    status = process.returncode
    try:
        found = json.loads(output)
    except ValueError:
        found = None
    if isinstance(found, dict) and status == 0:
        return found
    if isinstance(found, dict) and found.get("error"):
        raise ProbeFailed(f"The measurement failed: {found['error']}.", "Choose other or fewer cores.")
    said = errors.decode(errors="replace").strip()
    reason = exit_reason(status, said, said.splitlines()[-1][:200] if said and status > 0 else "")
    hint = "Close other programs." if "OOM" in reason else "Measure again."
    raise ProbeFailed(f"The measuring process ended: {reason}.", hint)


def sets_of(topology: Topology, cpus: Collection[int] = ()) -> dict[str, tuple[int, ...]]:
    """Return the sets of cores that tell the fabric link of an L3 group from the memory behind it: `cpus` (none: those
    that compute by default), one of them, and those of one L3 group, by the fields of `Peaks`."""
    chosen = tuple(sorted(set(cpus))) or choose_cores(topology).cpus
    group = tuple(max(topology.by_l3(chosen).values(), key=len, default=()))
    return {"one_core": chosen[:1], "l3_group": group, "all_cores": chosen}


def survey(
    topology: Topology, on_progress: Progress, *, cpus: Sequence[int] = (), policy: str = "", root: Path = ROOT
) -> dict[str, ReadBandwidth]:
    """Measure and keep all `sets_of`, in about 6 seconds. Raises ProbeFailed as `measure`."""
    sets = {name: some for name, some in sets_of(topology, cpus).items() if some}
    names = {"one_core": "1 core", "l3_group": "1 L3 group", "all_cores": "all cores"}
    words = {sets[name]: what for name, what in names.items() if name in sets}
    found: dict[tuple[int, ...], ReadBandwidth] = {}
    for number, (some, what) in enumerate(words.items()):
        beside = _BESIDE if any(one.disturbed for one in found.values()) else ""
        on_progress(number, len(words), what + beside)
        found[some] = measure(some, policy=policy, root=root)
        keep(found[some], policy, root=root)
    return {name: found[some] for name, some in sets.items()}


def slices(
    sets: Collection[tuple[int, ...]], policy: str = "", *, cancelled: Cancelled = lambda: False, root: Path = ROOT
) -> Iterator[tuple[int, ...]]:
    """Measure and keep these sets of cores anew in slices of under a second, in turn, until each had its windows; yield
    the set before each. Beside other programs a figure is the least. Raises ProbeFailed and Interrupted as `measure`.
    """
    for some in sets:
        store.forget(on_cores(some, policy, root), _WINDOWS)  # or the last windows would begin another measurement
    for _ in range(WINDOWS // SLICE):
        for some in sets:
            yield some
            keep_slice(measure(some, rounds=SLICE, policy=policy, cancelled=cancelled, root=root), policy, root=root)


def known_of(topology: Topology, cpus: Collection[int] = (), policy: str = "", *, root: Path = ROOT) -> Peaks:
    """Return what is known of all `sets_of`, and at least an estimate of all cores."""
    found = {name: known(some, policy, root=root) for name, some in sets_of(topology, cpus).items()}
    return Peaks(**found | {"all_cores": expected(sets_of(topology, cpus)["all_cores"], policy, root=root)})
