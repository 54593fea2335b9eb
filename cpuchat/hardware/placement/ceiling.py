"""Computes the highest speed that a placement can reach, from the read bandwidth of its cores."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from cpuchat.errors import UsageError
from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.placement.candidates import OWN_SOCKET, Candidate
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import Topology


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The ceiling of a placement: times of one round (all drafts, one verify pass) in seconds.

    `limit` says what bounds it, `remarks` what else to know. `plain_tok_s` is the target without a draft model on all
    cores, for comparison.
    """

    tok_s: float
    plain_tok_s: float
    t_target_s: float
    t_draft_s: float
    limit: str
    remarks: tuple[str, ...] = ()


def read_rate(
    topology: Topology,
    cpus: Collection[int],
    *,
    peak: float,
    l3_link: float | None = None,
    one_core: float | None = None,
    memory: str = "auto",
) -> tuple[float, str]:
    """Return the bytes per second that `cpus` can read together, and what bounds them: "memory", "link" or "cores".

    Each link carries what its cores ask for, at most `l3_link`; all links together at most the part of `peak` (the
    whole machine's) that belongs to the sockets of `cpus`, and to the nodes that the policy `memory` binds to. None:
    not known, no bound.
    """
    sockets = {core.package for cpu in cpus if (core := topology.core_of(cpu)) is not None}
    share = max(len(sockets), 1) / max(len(topology.packages), 1)
    if memory.startswith("bind:"):
        share = min(share, len(parse_cpu_list(memory.removeprefix("bind:"))) / max(len(topology.cpu_nodes), 1))
    most = peak * share
    if one_core is None and l3_link is None:
        return most, "memory"
    cores: dict[int, set[int]] = {}
    for cpu in cpus:
        core, group = topology.core_of(cpu), topology.l3_of(cpu)
        cores.setdefault(group.fabric_link if group is not None else -1, set()).add(
            core.index if core is not None else cpu
        )
    total, on_link = 0.0, False
    for link, members in cores.items():
        asked = len(members) * one_core if one_core is not None else float("inf")
        limit = l3_link if l3_link is not None and link >= 0 else float("inf")
        total += min(asked, limit)
        on_link = on_link or limit <= asked
    if total >= most:
        return most, "memory"
    return total, "link" if on_link else "cores"


def ceiling(
    candidate: Candidate,
    topology: Topology,
    *,
    target_bytes: float,
    draft_bytes: float,
    peak: float,
    l3_link: float | None = None,
    one_core: float | None = None,
    tokens_per_pass: float = 1.0,
    depth: int = 0,
    overlap: bool = False,
) -> Ceiling:
    """Compute what `candidate` reaches at best (reference/hardware.md, "Numbers for judging plans").

    Sequentially: t = target / B(target cores) + depth * draft / B(draft cores). With overlap the longer of both, and
    not less than all bytes together through the memory. Computing is not counted.

    Args:
        target_bytes, draft_bytes: read per pass of each model.
        peak, l3_link, one_core: measured read bandwidth of the whole machine, of one L3 group alone, and of one core,
            in bytes per second (None: not known, taken as no bound).
        tokens_per_pass: tokens that a verify pass yields, its own one included.
        depth: tokens drafted for each pass.
        overlap: draft the next round while this one is verified; counts only for a draft model on cores of its own.

    Raises:
        UsageError: bytes, bandwidth or tokens that are not above 0.
    """
    if min(target_bytes, peak, tokens_per_pass) <= 0 or min(draft_bytes, depth) < 0:
        raise UsageError("Sizes, bandwidth and tokens per pass must be above 0.")

    def speed_of(cpus: Collection[int], memory: str) -> tuple[float, str]:
        return read_rate(topology, cpus, peak=peak, l3_link=l3_link, one_core=one_core, memory=memory)

    placement, memory = candidate.placement, candidate.spec.memory
    own = placement.is_split
    speed, bound = speed_of(placement.cpus, memory)
    draft_speed, draft_bound = speed_of(placement.draft_cpus if own else placement.cpus, memory)
    t_target = target_bytes / speed
    t_draft = depth * draft_bytes / draft_speed
    overlap = overlap and own and depth > 0
    t_memory = (target_bytes + depth * draft_bytes) / peak
    t_round = max(t_target, t_draft, t_memory) if overlap else t_target + t_draft
    whole, _ = speed_of(choose_cores(topology).cpus, "auto")
    plain = whole / target_bytes
    result = Ceiling(
        tokens_per_pass / t_round,
        plain,
        t_target,
        t_draft,
        _limit(t_target, t_draft, t_memory if overlap else 0.0, bound, draft_bound),
    )
    return replace(result, remarks=tuple(_remarks(candidate, topology, result, draft_bytes, depth, overlap)))


def _limit(t_target: float, t_draft: float, t_memory: float, bound: str, draft_bound: str) -> str:
    if t_memory > max(t_target, t_draft):
        return "memory bandwidth, shared by both models"
    where = {"memory": "memory bandwidth", "link": "the links of its L3 groups", "cores": "its cores"}
    if t_draft > t_target:
        return f"the draft model, by {where[draft_bound]}"
    return f"the target model, by {where[bound]}"


def _remarks(
    candidate: Candidate, topology: Topology, result: Ceiling, draft_bytes: float, depth: int, overlap: bool
) -> list[str]:
    remarks = []
    own = candidate.placement.is_split
    if depth and draft_bytes and own:
        remarks.append(_cache_remark(topology, candidate.placement.draft_cpus, draft_bytes))
        if not overlap:
            remarks.append("Without overlap, one model's cores idle while the other computes.")
    if depth and result.tok_s < result.plain_tok_s:
        remarks.append(f"Slower than plain decoding on all cores ({result.plain_tok_s:.3g} tok/s).")
    if candidate.name == OWN_SOCKET:
        remarks.append("Memory is interleaved, so half of the reads cross sockets.")
    if candidate.spec.memory == "auto" and not own and len(topology.packages) > 1:
        remarks.append("With memory interleaved, half of the reads cross sockets: expect less.")
    if topology.virtual:
        remarks.append("A virtual machine's L3 groups may not be real: trust the measurement.")
    return [remark for remark in remarks if remark]


def _cache_remark(topology: Topology, cpus: Collection[int], draft_bytes: float) -> str:
    """Return whether a draft model could stay in the L3 caches of its own cores."""
    size = topology.l3_bytes(cpus)
    if not size:
        return ""
    model, cache = f"{draft_bytes / 1e6:.0f} MB", f"{size >> 20} MB"
    if draft_bytes > size:
        return (
            f"The draft model of {model} does not fit the L3 of {cache} of its cores ({draft_bytes / size:.0f} times "
            "its size): it is read from memory for every token."
        )
    return f"The draft model of {model} fits the L3 of {cache} of its cores and may be faster than this."
