"""Checks of the memory: modules, NUMA nodes, bandwidth, available space."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cpuchat.hardware.bandwidth.memory_modules import channel_of, usual_memory
from cpuchat.hardware.diagnostics.facts import DiagnosticFacts
from cpuchat.hardware.diagnostics.findings import Finding, by_plan
from cpuchat.telemetry import units

_GOOD_SHARE = 0.65
"""Expected share of the theoretical peak. Measured: 74 to 84 % on Genoa, 92 to 99 % on Turin, 75 to 92 % on Milan, 68 %
on a Rome with half of its dies.
"""
_GOOD_LINK_SHARE = 0.8
"""Expected share of the bandwidth of all fabric links together; a single link is measured at its best."""
_LITTLE_SHARE, _LITTLE_BYTES, _ENOUGH_BYTES = 0.1, 1 << 30, 4 << 30
_SWAP_BYTES = 256 << 20


def channels(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report channels without a module, which add no bandwidth."""
    limit = facts.theoretical
    if facts.topology.virtual or limit is None or limit.possible is None:
        return
    used, possible = limit.channels, limit.possible
    evidence = f"{used} of {possible} channels populated ({limit.source}), theoretical peak {_gb(limit.bytes_per_s)}/s"
    if used < possible:
        fix = f"Install equal modules in all {possible} channels: bandwidth and tok/s grow with their number."
        title = "Only one memory channel is populated" if used == 1 else "Some memory channels are empty"
        yield Finding("problem" if used == 1 else "warning", title, evidence, fix)
    elif not limit.assumed:
        yield Finding("ok", "memory channels", evidence)


def speeds(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report modules that run below the speed that the CPU supports; all run at the speed of the slowest."""
    found: dict[int, int] = {}
    for module in facts.modules:
        if module.speed_mt:
            found[module.speed_mt] = found.get(module.speed_mt, 0) + 1
    if len(found) > 1:
        evidence = ", ".join(f"{n} at {speed} MT/s" for speed, n in sorted(found.items()))
        fix = "Use identical modules: the slowest one sets the speed of its channel."
        yield Finding("warning", "Memory modules differ in speed", evidence, fix)
        return
    usual = usual_memory(facts.topology)
    if found and usual is not None:
        [speed] = found
        doubled = len({channel_of(module) for module in facts.modules} - {""}) < len(facts.modules)
        evidence = f"{sum(found.values())} modules at {speed} MT/s, {facts.topology.cpu_name} supports {usual[1]} MT/s"
        if speed < 0.95 * usual[1]:
            more = " Two modules per channel lower the speed of all." if doubled else ""
            fix = f"Check the memory speed in the firmware setup and the rating of the modules.{more}"
            yield Finding("advice", "Memory runs below the speed that the CPU supports", evidence, fix)
        else:
            yield Finding("ok", "memory speed", evidence)


def bandwidth(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Compare the read bandwidth with the theoretical peak of the modules."""
    if facts.peak is None:
        yield Finding(
            "advice", "The read bandwidth has not been measured", "bandwidth utilization and ceilings need it",
            "`cpuchat probe` measures it in under 15 seconds; so does the first chat.",
        )  # fmt: skip
        return
    measured, limit = facts.peak.bytes_per_s, facts.theoretical
    if limit is None:
        return
    share = measured / limit.bytes_per_s
    of = f"{measured / 1e9:.1f} of {limit.bytes_per_s / 1e9:.1f} GB/s ({100 * share:.0f} %, {facts.peak.source})"
    evidence = f"{of}; {limit.source}"
    wanted = sum(core.kind != "efficient" for core in facts.topology.cores)
    # A part of the machine has a part of the links to memory.
    whole = not facts.topology.virtual and facts.topology.quota is None and len(facts.peak.cpus) >= wanted
    links = _links(facts)
    if whole and share < _GOOD_SHARE and links is not None and measured >= _GOOD_LINK_SHARE * links:
        n = len(facts.topology.fabric_links)
        words = f"the {n} fabric links of its L3 groups carry" if n > 1 else "the fabric link of its L3 group carries"
        yield Finding("ok", "read bandwidth", f"{evidence}; {words} {links / 1e9:.0f} GB/s at most")
    elif whole and share < _GOOD_SHARE:
        fix = "Measure on an idle machine; then check for empty channels and NPS1 in the firmware setup."
        yield Finding("advice", "The read bandwidth is far below the theoretical peak", evidence, fix)
    elif share > 1.05:
        fix = "One of the two is wrong: list the modules with sudo dmidecode -t memory."
        yield Finding("advice", "The read bandwidth exceeds the theoretical peak", evidence, fix)
    else:
        yield Finding("ok", "read bandwidth", evidence)


def _links(facts: DiagnosticFacts) -> float | None:
    """Return the bandwidth of the fabric links of all L3 groups together, in bytes per second; None if it was not
    measured, and on CPUs without such links.
    """
    found = facts.survey
    if found is None or facts.topology.vendor != "AuthenticAMD":
        return None
    one = found.fabric_link or found.l3_group
    return one.bytes_per_s * len(facts.topology.fabric_links) if one is not None else None


def balancing(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report NUMA balancing, which samples accesses by page faults and migrates pages while they are read."""
    if facts.balancing is None or len(facts.topology.nodes) < 2:
        return
    evidence = f"/proc/sys/kernel/numa_balancing is {facts.balancing}, {len(facts.topology.nodes)} NUMA nodes"
    if facts.balancing:
        yield Finding("warning", "NUMA balancing is on", evidence, by_plan(facts, "numa-balancing"))
    else:
        yield Finding("ok", "NUMA balancing off", evidence)


def nodes(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report how the firmware divides the memory of AMD servers: by measurement NPS1 is best for one model, NPS0
    worst.
    """
    machine = facts.topology
    if machine.virtual or "EPYC" not in machine.model:
        return
    count, sockets = len(machine.cpu_nodes), len(machine.packages)
    evidence = f"{machine.sockets_words} as {units.plural(count, 'NUMA node')}"
    if sockets > 1 and count == 1:
        fix = "Set NPS1 in the firmware setup: memory latency drops by about 90 ns."
        yield Finding("warning", "NPS0: both sockets are one NUMA node", evidence, fix)
    elif count > 4 * sockets:
        fix = 'Disable "L3 as NUMA domain" in the firmware setup; a single model reads all memory evenly.'
        yield Finding("advice", "Each L3 group is a NUMA node", evidence, fix)
    elif count > sockets:
        fix = "Set NPS1 in the firmware setup if this machine runs one model: about 1 to 3 % faster."
        yield Finding("advice", f"NPS{count // sockets}: several NUMA nodes per socket", evidence, fix)
    else:
        yield Finding("ok", "NPS1", evidence)


def huge_pages(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report disabled huge pages: copied weights are in anonymous memory, where huge pages save page table walks."""
    if facts.thp == "never":
        evidence = "/sys/kernel/mm/transparent_hugepage/enabled is never"
        yield Finding("advice", "Transparent huge pages are off", evidence, by_plan(facts, "thp"))
    elif facts.thp:
        yield Finding("ok", "huge pages", facts.thp)


def room(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report too little memory: weights that do not fit are read from disk for every token."""
    size, available = facts.settings.model_bytes, facts.available
    limit = facts.topology.memory_limit
    total = limit or facts.topology.memory_total
    where = f", cgroup memory limit: {_gb(limit)}" if limit else ""
    if size and size > available:
        evidence = f"{facts.settings.model} is {_gb(size)}; {_gb(available)} of {_gb(total)} available{where}"
        fix = "Raise the limit or free memory." if limit and limit < size else "Close other programs."
        yield Finding("problem", "The model does not fit into memory", evidence, f"{fix} Or use a smaller model.")
    elif total and available < max(min(_LITTLE_SHARE * total, _ENOUGH_BYTES), _LITTLE_BYTES):
        evidence = f"{_gb(available)} of {_gb(total)} available{where}"
        yield Finding("warning", "Little memory is available", evidence, "Close other programs, or raise the limit.")
    elif total:
        yield Finding("ok", "memory", f"{_gb(available)} of {_gb(total)} available{where}")


def swap(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report swap in use: swapped-out weights delay every token until they are read back."""
    if facts.swap_used > _SWAP_BYTES:
        swap = f"{_gb(facts.swap_used)} of {_gb(facts.swap_total)} swap in use"
        evidence = f"{swap}, {_gb(facts.available)} memory available"
        fix = "Free memory, then swapoff -a and swapon -a; or keep the model in memory: engine.mlock."
        yield Finding("advice", "Swap is in use", evidence, fix)


def _gb(n_bytes: float | None) -> str:
    return f"{units.gigabytes(n_bytes or 0)} GB"


CHECKS: tuple[Callable[[DiagnosticFacts], Iterator[Finding]], ...] = (
    channels, speeds, bandwidth, balancing, nodes, huge_pages, room, swap,
)  # fmt: skip
