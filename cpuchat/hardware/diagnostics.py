"""Diagnostics: what limits inference on this machine, with evidence and what to do.

`gather_facts` reads everything that affects the speed, without measuring; `examine` runs all checks over it, each a
pure function of the facts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from cpuchat.base.errors import CpuchatError
from cpuchat.hardware.bandwidth.theoretical import MODULES, Theoretical, theoretical
from cpuchat.hardware.counters import Kernel
from cpuchat.hardware.knobs import Knob, container, read_knobs
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.memory import available_bytes, available_within, meminfo
from cpuchat.hardware.microarchitecture import AVX2
from cpuchat.hardware.monitor import counter_states
from cpuchat.hardware.numa.mempolicy import apply, parse_policy
from cpuchat.hardware.placement.cores import n_sharing_a_core
from cpuchat.hardware.placement.placement import Placement, PlacementError, PlacementSpec, place
from cpuchat.hardware.sysfs import ROOT, Clock, clock, read_text
from cpuchat.hardware.topology import FEATURES, Topology, read_topology
from cpuchat.protocol.model_info import EngineInfo
from cpuchat.telemetry import units
from cpuchat.telemetry.machine import NO_PEAKS, Peaks
from cpuchat.telemetry.metric import Metric, missing

_DEFAULT = PlacementSpec()
_UNTRIED: Metric[str] = missing("not opened yet")


@dataclass(frozen=True, slots=True)
class DiagnosticFacts:
    """The machine at one moment, the placement that the settings want, and the model in use; sizes in bytes. "", 0 and
    None mean unknown or absent.

    `clock` is that of the cores of `placement`, `free_on` the memory available by node, of several.
    `placement` is what the settings mean here, None where they cannot be applied, as `problems` say by field;
    `policy_refused` is why the kernel rejects the memory policy. `load` is the load average of the last minute,
    `others` are the programs that compute most.
    `engine_error` is why there is no engine."""

    topology: Topology
    spec: PlacementSpec = _DEFAULT
    model: str = ""
    model_bytes: int = 0
    clock: Clock | None = None
    free_on: Mapping[int, int] = field(default_factory=dict[int, int])
    placement: Placement | None = None
    problems: Mapping[str, str] = field(default_factory=dict[str, str])
    policy_refused: str = ""
    available: int = 0
    swap_total: int = 0
    swap_used: int = 0
    load: float | None = None
    others: tuple[str, ...] = ()
    container: str = ""
    theoretical: Theoretical | None = None
    peaks: Peaks = NO_PEAKS
    knobs: tuple[Knob, ...] = ()
    counter: Metric[str] = _UNTRIED
    power: Metric[str] = _UNTRIED
    engine: EngineInfo | None = None
    engine_error: CpuchatError | None = None


def refused_policy(words: str) -> str:
    """Try a memory policy in a thread, whose memory it would be; returns why the kernel rejects it, else ""."""
    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(apply, parse_policy(words)).exception()
    return str(error) if error is not None else ""


def gather_facts(
    spec: PlacementSpec = _DEFAULT,
    *,
    model: str = "",
    model_bytes: int = 0,
    engine: EngineInfo | None = None,
    engine_error: CpuchatError | None = None,
    topology: Topology | None = None,
    kernel: Kernel | None = None,
    refused: Callable[[str], str] = refused_policy,
    known: Callable[..., Peaks] = lambda *_, **__: NO_PEAKS,
    counts: bool = True,
    root: Path = ROOT,
) -> DiagnosticFacts:
    """Read what can be read, without measuring anything; never raises for what is unknown. `known` tells the peaks, as
    `measure.peak.known_of`; `counts`: counters are tried. `kernel` and `refused` are of simulated kernels in tests."""
    topology = topology or read_topology(root)
    placement, problems = None, dict[str, str]()
    try:
        placement = place(topology, spec)
    except PlacementError as error:
        problems = error.problems
    except CpuchatError as error:
        problems = {"cores": str(error)}
    cpus, policy = (placement.cpus, placement.memory_policy.words) if placement is not None else ((), "")
    counter, power = counter_states(topology, root, kernel) if counts else (_UNTRIED, _UNTRIED)
    info, load = meminfo(root), read_text(root / "proc/loadavg").split(" ")[0]
    return DiagnosticFacts(
        topology=topology,
        spec=spec,
        model=model,
        model_bytes=model_bytes,
        clock=clock(root, cpus),
        free_on={n.number: available_within((n.number,), root) for n in topology.nodes if len(topology.nodes) > 1},
        placement=placement,
        problems=problems,
        policy_refused=refused(policy) if placement is not None and placement.memory_policy.places else "",
        available=available_bytes(root),
        swap_total=info.get("SwapTotal", 0),
        swap_used=max(info.get("SwapTotal", 0) - info.get("SwapFree", 0), 0),
        load=float(load) if re.fullmatch(r"[0-9.]+", load) else None,
        container=container(root),
        theoretical=theoretical(topology),
        peaks=known(topology, cpus, policy, root=root) if cpus else NO_PEAKS,
        knobs=read_knobs(topology, root),
        counter=counter,
        power=power,
        engine=engine,
        engine_error=engine_error,
    )


Level = Literal["problem", "warning", "advice", "ok"]
ORDER: Final[tuple[Level, ...]] = ("problem", "warning", "advice", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `evidence` is what was read or measured, `fix` what to do ("" when it is ok).

    problem: inference does not work or is many times too slow. warning: clearly slower than possible. advice: maybe
    slightly slower, or unknown. ok: checked, nothing to do."""

    level: Level
    title: str
    evidence: str
    fix: str = ""


UNVERIFIED: Final = "Virtual machine: the topology is unverified"
"""The title of what nobody can do anything about from inside."""
LOADED: Final = "Other programs use the cores"
UNMEASURED: Final = "The read bandwidth has not been measured"
UNDISTURBED: Final = f"{UNMEASURED} undisturbed"


def cores(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report settings that this machine cannot apply, and threads that share a core with its path to memory."""
    spec, placed = facts.spec, facts.placement
    if problem := facts.problems.get("cores") or facts.problems.get("threads"):
        words = f"engine.cores {spec.cores}, engine.threads {spec.threads}: {problem}"
        yield Finding("problem", "The configured cores cannot be used", words, "Set both to auto and 0.")
    if problem := facts.problems.get("memory_policy"):
        words = f"engine.memory_policy {spec.memory_policy}: {problem}"
        yield Finding("problem", "The configured memory policy cannot be used", words, "Set it to auto.")
    if placed is None:
        return
    if facts.policy_refused:
        evidence = f"{placed.memory_policy.words}: {facts.policy_refused}"
        fix = "In a container, allow set_mempolicy: docker run --cap-add SYS_NICE."
        yield Finding("warning", "The memory policy is not in effect", evidence, fix)
    n = len(placed.cpus)
    if shared := n_sharing_a_core(facts.topology, placed.cpus):
        evidence = f"{shared} of {n} threads share a core with another (CPUs {format_cpu_list(placed.cpus)})"
        fix = "Use one thread per core: engine.cores auto, engine.threads 0."
        yield Finding("warning", "SMT siblings are in use", evidence, fix)
    elif facts.topology.smt:
        yield Finding("ok", "one thread per core", f"{n} threads on {facts.topology.n_cores(placed.cpus)} cores")


def others(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report who else has a part of the machine: a cgroup CPU quota throttles all threads periodically, a thread that
    waits for its core delays all others, and a virtual machine may show other caches and nodes than the host has."""
    machine = facts.topology
    n, usable = len(machine.cores), len(machine.allowed_cores)
    if (granted := machine.quota) is not None:
        if facts.spec.threads > max(math.floor(granted), 1):
            evidence = f"{facts.spec.threads} threads configured, cgroup CPU quota: {granted:g}"
            yield Finding("problem", "The CPU quota is below the thread count", evidence, "Set engine.threads to 0.")
        elif granted < usable:
            evidence = f"cgroup CPU quota: {granted:g}, {usable} cores available"
            fix = "Raise cpu.max (docker run --cpus), or better assign whole cores (--cpuset-cpus)."
            yield Finding("warning", "The CPU quota leaves cores unused", evidence, fix)
        else:
            yield Finding("ok", "CPU quota", f"{granted:g} CPUs for {usable} cores")
    if facts.load is not None and n:  # of the whole machine, also in a container
        evidence = f"load average {facts.load:.1f} over the last minute, {n} cores"
        if facts.load > n / 2:
            level: Level = "warning" if facts.load > n else "advice"
            who = f"Stop {' and '.join(facts.others)}" if facts.others else "Find them with top; stop them"
            yield Finding(level, LOADED, evidence, f"{who} or wait.")
        else:
            yield Finding("ok", "other load", evidence)
    if machine.virtual:
        evidence = f"{machine.virtual}; reports {machine.cores_words}, {machine.nps_words}"
        fix = "Rely on `cpuchat probe`; on the host, pin virtual CPUs to dedicated cores."
        yield Finding("advice", UNVERIFIED, evidence, fix)


def knobs(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report settings that only root can change and that matter as they are."""
    for knob in facts.knobs:
        if knob.level == "ok":
            yield Finding("ok", knob.name, knob.state)
        elif knob.level:
            fix = f"The line that `cpuchat doctor` prints under `{knob.name}` sets it."
            if not knob.change:
                fix = "Not changeable from here: ask the administrator of the machine."
            yield Finding(knob.level, f"{knob.name}: {knob.state}", f"to gain: {knob.worth}", fix)


def hidden(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report instructions that every CPU of this kind has and this one does not show: a hypervisor or the firmware
    hides them. In a virtual machine AVX2 is expected of any x86: hardly a host lacks it."""
    machine = facts.topology
    kind, always = machine.microarchitecture
    if machine.virtual and machine.architecture == "x86_64" and not kind:
        always = AVX2
    lacking = always - machine.flags
    if not lacking or not machine.flags or re.search("Pentium|Celeron", machine.model):
        return
    names = [FEATURES[flag] for flag in FEATURES if flag in lacking]
    fix = "Turn them on in the firmware setup, or update the kernel."
    if machine.virtual:
        fix = "Pass the host's CPU through: `-cpu host` in QEMU, host-passthrough in libvirt, type host in Proxmox."
    what = "The virtual machine hides" if machine.virtual else "The system hides"
    evidence = f"{kind or 'its host'} usually has {'it' if len(names) == 1 else 'them'}"
    yield Finding(_level_of(names), f"{what} {', '.join(names)}", evidence, fix)


_MATTERS = frozenset({"AVX", "AVX2", "FMA", "F16C", "NEON", "DOTPROD"})
_MATTERS_LESS = frozenset({"AVX512", "AVX512_VNNI", "AMX_INT8", "MATMUL_INT8"})
_REBUILD = "Build it for this machine: `make setup`, or reinstall llama-cpp-python with CMAKE_ARGS=-DGGML_NATIVE=ON."


def engine(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report instruction sets that the CPU has and the engine lacks, and the reverse."""
    if facts.engine is None:
        if error := facts.engine_error:
            fix = error.hint or f"Fix this error. If the engine is broken: {_REBUILD[0].lower()}{_REBUILD[1:]}"
            yield Finding("problem", "The engine does not start", error.message, fix)
        return
    flags, module = facts.topology.flags, facts.engine.module
    missing = [name for flag, name in FEATURES.items() if flag in flags and name not in facts.engine.features]
    foreign = [name for flag, name in FEATURES.items() if flag not in flags and name in facts.engine.features]
    has = ", ".join(facts.engine.features) or "no optional features"
    if not flags:
        return
    if foreign:
        evidence = f"built with {', '.join(foreign)}, which this CPU lacks; it may crash at any time"
        yield Finding("problem", "The engine was built for another CPU", evidence, _REBUILD)
    elif module in facts.engine.modules:
        yield Finding("ok", f"CPU module {module} of the engine's wheel", has)
    elif module:
        title = f"The CPU module {module} leaves out instructions of this CPU"
        evidence = f"it has {has}; this CPU also runs {', '.join(facts.engine.modules)}"
        yield Finding("advice", title, evidence, "Set engine.cpu_module to auto.")
    elif not missing:
        yield Finding("ok", "engine built for this CPU", has)
    if missing and (foreign or not module):  # those of a module are a choice
        evidence = f"the CPU has {', '.join(missing)}; the engine has {has}"
        yield Finding(_level_of(missing), f"The engine was built without {', '.join(missing)}", evidence, _REBUILD)


def _level_of(lacking: Collection[str]) -> Level:
    """Return how much it matters that these features are lacking."""
    return "problem" if _MATTERS & {*lacking} else "warning" if _MATTERS_LESS & {*lacking} else "advice"


_GOOD_SHARE = 0.65
"""Expected share of the theoretical peak. Measured: Genoa 74-84 %, Turin 92-99 %, Milan 75-92 %, Rome (half) 68 %."""
_GOOD_LINK_SHARE = 0.8
"""Expected share of the bandwidth of all fabric links together; a single link is measured at its best."""
_LITTLE_SHARE, _LITTLE_BYTES, _ENOUGH_BYTES = 0.1, 1 << 30, 4 << 30
_SWAP_BYTES = 256 << 20


def bandwidth(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Compare the read bandwidth with the theoretical peak of the modules."""
    peak = facts.peaks.all_cores
    if peak is None or peak.estimated:
        title = UNDISTURBED if peak is not None and peak.least else UNMEASURED
        fix = "`cpuchat probe` measures it in about 30 seconds; so does an idle chat."
        yield Finding("advice", title, "utilization and limits rest on an estimate until then", fix)
        return
    measured, limit = peak.bytes_per_s, facts.theoretical
    if limit is None:
        return
    share = measured / limit.bytes_per_s
    of = (
        f"{units.bandwidth(measured)} of {units.bandwidth(limit.bytes_per_s)} GB/s ({100 * share:.0f} %, {peak.source})"
    )
    evidence = f"{of}; {limit.source}"
    wanted = sum(core.kind != "efficient" for core in facts.topology.cores)
    # A part of the machine has a part of the links to memory.
    whole = not facts.topology.virtual and facts.topology.quota is None and len(peak.cpus) >= wanted
    links, group = None, facts.peaks.l3_group
    if group is not None and facts.topology.vendor == "AuthenticAMD":
        links = group.bytes_per_s * len(facts.topology.fabric_links)
    if whole and share < _GOOD_SHARE and links is not None and measured >= _GOOD_LINK_SHARE * links:
        n = len(facts.topology.fabric_links)
        words = f"the {n} fabric links of its L3 groups carry" if n > 1 else "the fabric link of its L3 group carries"
        yield Finding("ok", "read bandwidth", f"{evidence}; {words} {units.bandwidth(links)} GB/s at most")
    elif whole and share < _GOOD_SHARE:
        fix = f"Measure on an idle machine; then look for empty channels and slow modules (`{MODULES}`) and for NPS1."
        yield Finding("advice", "The read bandwidth is far below the theoretical peak", evidence, fix)
    elif share > 1.05:
        fix = f"One of the two is wrong: list the modules with `{MODULES}`."
        yield Finding("advice", "The read bandwidth exceeds the theoretical peak", evidence, fix)
    else:
        yield Finding("ok", "read bandwidth", evidence)


def nodes(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report how firmware divides the memory of AMD servers: as measured, NPS1 is best for one model, NPS0 worst."""
    machine = facts.topology
    if any(node.memory for node in machine.nodes) and (empty := [n for n in machine.cpu_nodes if not n.memory]):
        numbers, usable = (format_cpu_list([n.number for n in some]) for some in (empty, {*machine.nodes} - {*empty}))
        evidence = f"the cores of {units.plural(len(empty), 'node')} ({numbers}) read the memory of others"
        fix = f"Put modules into their channels, or compare the cores beside memory: engine.cores node:{usable}."
        yield Finding("advice", "NUMA nodes without memory", evidence, fix)
    if machine.virtual or "EPYC" not in machine.model:
        return
    count, sockets = len(machine.cpu_nodes), len(machine.packages)
    evidence = f"{machine.sockets_words} as {units.plural(count, 'NUMA node')}"
    if sockets > 1 and count == 1:
        fix = "Set NPS1 in the firmware setup: memory latency drops by about 90 ns."
        yield Finding("warning", "NPS0: both sockets are one NUMA node", evidence, fix)
    elif count > sockets:
        fix = 'Set NPS1 in the firmware, without "L3 as NUMA domain", if it runs one model: about 1 to 3 % faster.'
        yield Finding("advice", f"{machine.nps_words}: several NUMA nodes per socket", evidence, fix)
    else:
        yield Finding("ok", "NPS1", evidence)


def room(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report too little memory: weights that are not in memory are read from disk for every token."""
    size, available = facts.model_bytes, facts.available
    limit = facts.topology.memory_limit
    total = limit or facts.topology.memory_total
    where = f", cgroup memory limit: {_gb(limit)}" if limit else ""
    if size and size > available:
        evidence = f"{facts.model} is {_gb(size)}; {_gb(available)} of {_gb(total)} available{where}"
        fix = "Raise the limit or free memory." if limit and limit < size else "Close other programs."
        yield Finding("problem", "The model does not fit into memory", evidence, f"{fix} Or use a smaller model.")
    elif total and available < max(min(_LITTLE_SHARE * total, _ENOUGH_BYTES), _LITTLE_BYTES):
        evidence = f"{_gb(available)} of {_gb(total)} available{where}"
        yield Finding("warning", "Little memory is available", evidence, "Close other programs, or raise the limit.")
    elif total:
        yield Finding("ok", "memory", f"{_gb(available)} of {_gb(total)} available{where}")


def swap(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report swap in use, which may hold weights."""
    if facts.swap_used > _SWAP_BYTES:
        used = f"{_gb(facts.swap_used)} of {_gb(facts.swap_total)} swap in use"
        fix = "Free memory, then swapoff -a and swapon -a; or keep the model in memory: engine.mlock."
        yield Finding("advice", "Swap is in use", f"{used}, {_gb(facts.available)} memory available", fix)


def _gb(n_bytes: float | None) -> str:
    return f"{units.gigabytes(n_bytes or 0)} GB"


def examine(facts: DiagnosticFacts, *, beside: bool = False) -> list[Finding]:
    """Return all findings, the worst first. What is unknown on a machine has none. `beside` a model of this program,
    which has a part in the load and in the memory that is taken, these say nothing of other programs."""
    checks = (engine, hidden, cores, others, knobs, bandwidth, nodes, *(() if beside else (room,)), swap)
    facts = replace(facts, load=None) if beside else facts
    found = [finding for check in checks for finding in check(facts)]
    return sorted(found, key=lambda finding: ORDER.index(finding.level))
