"""Ways to divide a machine between a target model and its draft model, and what each can reach.

Decoding reads all weights for each pass, so a layout is as fast as the paths that its cores read through: a core, the
fabric link of its L3 groups, the memory. One link carries a small part of what the memory gives (50 of 367 GB/s on an
EPYC 9354P). That is why a draft model on an L3 group of its own pays only while drafting and verifying overlap, and
why it is not made faster by the L3 cache: it is many times larger, and is read from memory for every token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from cpuchat.errors import UsageError
from cpuchat.hardware.lists import format_cpu_list, parse_cpu_list
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import Topology

IN_TURN: Final = "all cores, in turn"
OWN_L3: Final = "draft on its own L3 group"
OWN_LINK: Final = "draft on its own fabric link"
OWN_SOCKET: Final = "one socket drafts, the other verifies"
ONE_NODE: Final = "one node"


@dataclass(frozen=True, slots=True)
class Layout:
    """Who computes where. `target` and `draft` are logical CPUs, one per thread; `draft` None: the target's, in turn.

    `cores`, `draft_cores` and `memory` are the words for the settings; `reason` is one sentence.
    """

    name: str
    target: tuple[int, ...]
    draft: tuple[int, ...] | None
    cores: str
    draft_cores: str
    memory: str
    reason: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a layout reaches at best: times of one round (all drafts, one verify pass) in seconds.

    `limit` says what holds it up, `remarks` what else to know. `plain_tok_s` is the target without a draft model on
    all cores, for comparison.
    """

    tok_s: float
    plain_tok_s: float
    t_target_s: float
    t_draft_s: float
    limit: str
    remarks: tuple[str, ...] = ()


def layouts(topology: Topology) -> list[Layout]:
    """The layouts that this machine allows, the recommended one first."""
    found = [_in_turn(topology)]
    groups = sorted({core.l3 for core in topology.allowed_cores if core.l3 is not None})
    if len(groups) > 1:
        found += _with_own_l3(topology, groups[-1])
        found += _few_of_each(topology, groups)
    sockets = sorted({core.package for core in topology.allowed_cores})
    if len(sockets) > 1:
        found += _apart(
            topology, OWN_SOCKET, f"socket:{sockets[-1]}", f"socket:{sockets[0]}",
            "It pays only while both work at the same time: the target then has the cores of one socket alone.",
        )  # fmt: skip
    found += _one_node(topology)
    return found


def recommend(topology: Topology) -> Layout:
    """The layout to begin with; what is really fastest is measured."""
    return _in_turn(topology)


def _in_turn(topology: Topology) -> Layout:
    choice = choose_cores(topology)
    return Layout(IN_TURN, choice.cpus, None, "auto", "shared", "auto", _why_in_turn(topology, choice.cpus))


def _why_in_turn(topology: Topology, cpus: tuple[int, ...]) -> str:
    """One sentence: what sets this machine apart from one where all cores are alike and free to use."""
    n, all_cores = len(cpus), len(topology.allowed_cores)
    used = [core for cpu in cpus if (core := topology.core_of(cpu)) is not None]
    groups = {core.l3 for core in used if core.l3 is not None}
    nodes = sorted({core.node for core in used})
    who = f"All {n} cores, draft and target in turn"
    if topology.quota is not None and topology.quota < all_cores:
        return f"{n} of {all_cores} cores in turn: the control group grants the time of {topology.quota:g} CPUs."
    if all_cores < 2:
        return "There is one core, so there is nothing to divide."
    if topology.virtual:
        return f"{who}: on a virtual machine L3 groups and nodes need not be real, so nothing is divided by them."
    if any(core.kind == "efficient" for core in topology.allowed_cores) and n < all_cores:
        return f"The {n} performance cores in turn: the {all_cores - n} efficient ones would keep them waiting."
    if len(topology.packages) > 1 and len(nodes) > 1:
        return f"{who}, with memory interleaved: weights are read from the memory of both sockets at once."
    if len(nodes) > 1:
        return (
            f"{who}, with memory interleaved over {len(nodes)} nodes: that is what one node for the socket (NPS1) does "
            "by itself."
        )
    if not groups:
        return f"{who}: the machine does not tell its L3 groups, so nothing is divided by them."
    if len(groups) < 2:
        return f"{who}: they share one L3 cache and one way to memory, so there is nothing to divide."
    links = {group.fabric_link for cpu in cpus if (group := topology.l3_of(cpu)) is not None}
    if len(links) < len(groups):
        return (
            f"{who}: two L3 groups share a fabric link each, so one group for the draft model would take a part of "
            f"one of {len(links)} links and slow its neighbour down."
        )
    return (
        f"{who}: an L3 group of its own would give the draft model one of {len(links)} links to memory, and take it "
        "from the target."
    )


def _with_own_l3(topology: Topology, last: int) -> list[Layout]:
    group = topology.l3_groups[last]
    size = f" of {group.size >> 20} MB" if group.size else ""
    why = (
        f"It pays only while drafting and verifying overlap: its L3{size} holds no draft model, and its link to memory "
        "carries a part of what all links do."
    )
    found = _apart(topology, OWN_L3, f"l3:{last}", "auto", why)
    link = topology.fabric_links[group.fabric_link]
    if len(link) > 1 and len(topology.fabric_links) > 1:
        words = f"l3:{format_cpu_list(link)}"
        why = (
            "It pays only while drafting and verifying overlap; the L3 groups behind one link draft together, so "
            "nobody else is slowed down."
        )
        found += _apart(topology, OWN_LINK, words, "auto", why)
    return found


def _apart(topology: Topology, name: str, draft_cores: str, cores: str, reason: str) -> list[Layout]:
    """A layout with cores of its own for the draft model; none where that leaves nobody."""
    try:
        draft = choose_cores(topology, draft_cores).cpus
        target = choose_cores(topology, cores, without=draft).cpus
    except UsageError:
        return []
    return [Layout(name, target, draft, cores, draft_cores, "auto", reason)]


def _few_of_each(topology: Topology, groups: Collection[int]) -> list[Layout]:
    """Four cores of each L3 group, or two where it has no more than four."""
    sizes = [sum(core.l3 == group for core in topology.allowed_cores) for group in groups]
    n = 4 if min(sizes) > 4 else 2
    if min(sizes) <= n:
        return []
    try:
        choice = choose_cores(topology, f"{n}/l3")
    except UsageError:
        return []
    if len(choice.cpus) < n * len(sizes):  # the control group grants less
        return []
    return [Layout(
        f"{n} cores per L3 group", choice.cpus, None, f"{n}/l3", "shared", "auto",
        f"{n} cores come close to filling a group's link while an answer is written, with less waiting for each "
        "other; reading a prompt has fewer cores to compute on.",
    )]  # fmt: skip


def _one_node(topology: Topology) -> list[Layout]:
    nodes = sorted({core.node for core in topology.allowed_cores})
    mine = [node for node in topology.nodes if node.number in nodes and node.number in topology.allowed_nodes]
    if len(nodes) < 2 or not mine:
        return []
    node = max(mine, key=lambda node: (node.memory, -node.number))
    words = f"node:{node.number}"
    try:
        choice = choose_cores(topology, words)
    except UsageError:
        return []
    room = f"{node.memory / 1e9:.0f} GB of its memory" if node.memory else "memory of it"
    return [Layout(
        ONE_NODE, choice.cpus, None, words, "shared", f"bind:{node.number}",
        f"Nothing is read across nodes, but the bandwidth of the other {'node' if len(nodes) == 2 else 'nodes'} stays "
        f"unused, and the model must fit the {room}.",
    )]  # fmt: skip


def reach(
    topology: Topology,
    cpus: Collection[int],
    *,
    peak: float,
    l3_link: float | None = None,
    one_core: float | None = None,
    memory: str = "auto",
) -> tuple[float, str]:
    """Bytes per second that `cpus` can read together, and what bounds them: "memory", "link" or "cores".

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


def predict(
    layout: Layout,
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
    overhead_s: float = 0.0,
) -> Prediction:
    """What `layout` reaches at best, from what its cores can read (hardware reference, "Numbers for judging plans").

    In turn: t = target / B(target cores) + depth * draft / B(draft cores). With overlap the longer of both, and not
    less than all bytes together through the memory. Computing is not counted, so this is a ceiling.

    Args:
        target_bytes, draft_bytes: read per pass of each model.
        peak, l3_link, one_core: measured read bandwidth of the whole machine, of one L3 group alone, and of one core,
            in bytes per second (None: not known, taken as no bound).
        tokens_per_pass: tokens that a verify pass yields, its own one included.
        depth: tokens drafted for each pass.
        overlap: draft the next round while this one is verified; needs cores of its own for the draft model.
        overhead_s: what each pass of either model costs beside reading, in seconds.

    Raises:
        UsageError: bytes, bandwidth or tokens that are not above 0.
    """
    if min(target_bytes, peak, tokens_per_pass) <= 0 or min(draft_bytes, depth, overhead_s) < 0:
        raise UsageError("Sizes, bandwidth and tokens per pass must be above 0.")

    def speed_of(cpus: Collection[int], memory: str) -> tuple[float, str]:
        return reach(topology, cpus, peak=peak, l3_link=l3_link, one_core=one_core, memory=memory)

    speed, bound = speed_of(layout.target, layout.memory)
    own = layout.draft is not None
    draft_speed, draft_bound = speed_of(layout.draft if layout.draft is not None else layout.target, layout.memory)
    t_target = target_bytes / speed + overhead_s
    t_draft = depth * (draft_bytes / draft_speed + overhead_s)
    overlap = overlap and own and depth > 0
    t_memory = (target_bytes + depth * draft_bytes) / peak
    t_round = max(t_target, t_draft, t_memory) if overlap else t_target + t_draft
    whole, _ = speed_of(choose_cores(topology).cpus, "auto")
    plain = 1 / (target_bytes / whole + overhead_s)
    result = Prediction(
        tokens_per_pass / t_round, plain, t_target, t_draft,
        _limit(t_target, t_draft, t_memory if overlap else 0.0, bound, draft_bound),
    )  # fmt: skip
    return replace(result, remarks=tuple(_remarks(layout, topology, result, draft_bytes, depth, own, overlap)))


def _limit(t_target: float, t_draft: float, t_memory: float, bound: str, draft_bound: str) -> str:
    if t_memory > max(t_target, t_draft):
        return "memory, which both models read at the same time"
    where = {"memory": "the memory", "link": "the links of its L3 groups", "cores": "its cores"}
    if t_draft > t_target:
        return f"the draft model, by {where[draft_bound]}"
    return f"the target model, by {where[bound]}"


def _remarks(
    layout: Layout, topology: Topology, result: Prediction, draft_bytes: float, depth: int, own: bool, overlap: bool
) -> list[str]:
    remarks = []
    if depth and draft_bytes and layout.draft is not None:
        remarks.append(_cache_remark(topology, layout.draft, draft_bytes))
        if not overlap:
            remarks.append("Without overlap the cores of one model idle while the other one computes.")
    if depth and result.tok_s < result.plain_tok_s:
        remarks.append(
            f"This is slower than the target without a draft model on all cores ({result.plain_tok_s:.3g} tok/s)."
        )
    if layout.name == OWN_SOCKET:
        remarks.append("Memory is interleaved, so half of what each model reads comes from the other socket.")
    if layout.memory == "auto" and not own and len(topology.packages) > 1:
        remarks.append("With memory interleaved, half of all reads cross between the sockets: expect less than this.")
    if topology.virtual:
        remarks.append("On a virtual machine the L3 groups need not be real: trust what is measured.")
    return [remark for remark in remarks if remark]


def _cache_remark(topology: Topology, cpus: Collection[int], draft_bytes: float) -> str:
    """Whether a draft model could stay in the L3 caches of its own cores."""
    groups = {group.index: group.size for cpu in cpus if (group := topology.l3_of(cpu)) is not None}
    size = sum(groups.values())
    if not size:
        return ""
    model, cache = f"{draft_bytes / 1e6:.0f} MB", f"{size >> 20} MB"
    if draft_bytes > size:
        return (
            f"The draft model of {model} does not fit the L3 of {cache} of its cores ({draft_bytes / size:.0f} times "
            "as large): it is read from memory for every token."
        )
    return f"The draft model of {model} fits the L3 of {cache} of its cores and may be faster than this."
