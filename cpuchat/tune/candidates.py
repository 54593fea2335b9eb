"""The candidates of each choice of tuning: settings that may be faster than those in use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from cpuchat.base.errors import UsageError
from cpuchat.config.settings import Settings, value_of, with_changes
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.placement import placement as placements
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import Topology
from cpuchat.models.machine import GROUPS, MEASURED, set_keys
from cpuchat.protocol.model_info import EngineInfo
from cpuchat.protocol.options import UNQUANTIZED
from cpuchat.telemetry.units import plural

UBATCHES: Final = (128, 256, 512, 1024)
UBATCH_SECONDS: Final = 8.0
DEEP_SECONDS: Final = 3.5
"""Of prefill: attention only weighs with many tokens in the KV cache."""


@dataclass(frozen=True, slots=True, eq=False)
class TuningCandidate:
    """Settings to measure; `words` tell them from the other candidates of a choice."""

    words: str
    settings: Settings


@dataclass(frozen=True, slots=True)
class TuningChoice:
    """One thing to choose, about the settings `keys`. `prompt_seconds`: how long a prompt to measure with, in seconds
    of prefill. `test`: "prefill" where decoding cannot differ, "texts" where what is written matters. `skipped`: why
    there is nothing to try, "" if there is."""

    name: str
    keys: tuple[str, ...]
    now: TuningCandidate
    candidates: tuple[TuningCandidate, ...] = ()
    prompt_seconds: float = 1.5
    test: Literal["both", "prefill", "texts"] = "both"
    skipped: str = ""


def thread_choice(topology: Topology, chosen: Settings) -> TuningChoice:
    """Threads and cores: fewer, one for each core, one for each SMT sibling, the cores of each L3 group."""
    used = PlacementSpec.of(chosen)
    now = place(topology, used)
    found: dict[tuple[int, ...], TuningCandidate] = {}
    n_cores = len(_cpus(topology, PlacementSpec(memory_policy=used.memory_policy)))
    counts = (0, n_cores - 1, math.ceil(0.75 * n_cores), math.ceil(0.5 * n_cores))
    specs = [("auto", n if n != n_cores else 0) for n in dict.fromkeys(counts) if 0 <= n <= n_cores]
    specs += [("all", 0), (format_cpu_list(topology.allowed), 0)]  # all logical CPUs, where some share a core
    specs += [(one.spec.cores, 0) for one in placements.candidates(topology) if one.spec.cores.endswith("/l3")]
    for cores, threads in specs:
        spec = dataclasses.replace(used, cores=cores, threads=threads)
        cpus = _cpus(topology, spec)
        if cpus and cpus != now.cpus and cpus not in found:
            words = thread_words(topology, cpus)
            if cores.endswith("/l3"):
                words += f", {cores.partition('/')[0]} per L3 group"
            found[cpus] = _candidate(words, chosen, engine={"cores": cores, "threads": threads})
    here = TuningCandidate(thread_words(topology, now.cpus), chosen)
    return TuningChoice("threads", ("engine.threads", "engine.cores"), here, tuple(found.values()))


def memory_choice(topology: Topology, chosen: Settings) -> TuningChoice:
    """The NUMA policy, and the cores of one node with its memory."""
    now, keys = place(topology, PlacementSpec.of(chosen)), ("engine.memory_policy",)
    here = TuningCandidate(now.memory_policy.words, chosen)
    if len([node for node in topology.nodes if node.memory]) < 2:
        return TuningChoice("memory policy", keys, here, skipped="one NUMA node")
    found: dict[tuple[object, ...], TuningCandidate] = {}
    policies = ["auto", "local", "interleave"]
    specs = [dataclasses.replace(PlacementSpec.of(chosen), memory_policy=policy) for policy in policies]
    one_node = [one.spec for one in placements.candidates(topology) if one.name == placements.ONE_NODE]
    for spec in [*specs, *one_node]:
        try:
            placement = place(topology, spec)
        except UsageError:
            continue
        key = (placement.cpus, placement.memory_policy)
        if key != (now.cpus, now.memory_policy) and key not in found:
            words = f"{placement.memory_policy.words}, {thread_words(topology, placement.cpus)}"
            words = placement.memory_policy.words if placement.cpus == now.cpus else words
            found[key] = _candidate(words, chosen, engine={"cores": spec.cores, "memory_policy": spec.memory_policy,
                                                      "threads": spec.threads})  # fmt: skip
    return TuningChoice("memory policy", keys, here, tuple(found.values()))


def attention_choice(chosen: Settings) -> TuningChoice:
    """Flash attention on or off; `auto` turns it on."""
    engine, keys = chosen.engine, ("engine.flash_attn",)
    here = TuningCandidate(engine.flash_attn, chosen)
    if engine.type_v not in UNQUANTIZED:
        return TuningChoice("flash attention", keys, here, skipped=f"a V cache of type {engine.type_v} needs it")
    other = "auto" if engine.flash_attn == "off" else "off"
    return TuningChoice("flash attention", keys, here, (_candidate(other, chosen, engine={"flash_attn": other}),),
                  DEEP_SECONDS)  # fmt: skip


def module_choice(chosen: Settings, engine: EngineInfo) -> TuningChoice:
    """The CPU modules of the engine that are worth timing here, beside the one in use."""
    found = [_candidate(name, chosen, engine={"cpu_module": name}) for name in engine.modules if name != engine.module]
    return TuningChoice("CPU module", ("engine.cpu_module",), TuningCandidate(engine.module, chosen), tuple(found))


def ubatch_choice(chosen: Settings, max_tokens: int) -> TuningChoice:
    """The micro-batch, at most what a prompt of `max_tokens` fills."""
    now = min(chosen.engine.n_ubatch, chosen.engine.n_batch)
    sizes = [n for n in UBATCHES if n != now and n <= max_tokens]
    found = tuple(
        _candidate(str(n), chosen, engine={"ubatch": n, "batch": max(n, Settings().engine.n_batch)}) for n in sizes
    )
    keys, here = ("engine.ubatch", "engine.batch"), TuningCandidate(str(now), chosen)
    if not found:
        return TuningChoice("micro-batch", keys, here, skipped="prefill is too slow to measure long prompts")
    return TuningChoice("micro-batch", keys, here, found, UBATCH_SECONDS, test="prefill")


def drafter_choice(chosen: Settings, draft: str) -> TuningChoice:
    """All drafters, suffix decoding alone, none; with adaptive depth. `draft` names the draft model, "" for none."""
    keys, here = ("speculation.drafters", "speculation.depth"), TuningCandidate(drafter_words(chosen), chosen)
    # Without a draft model suffix decoding is all there is.
    names = ["auto", "suffix", "off"] if draft else ["auto", "off"]
    now = "auto" if chosen.speculation.drafters == "suffix" and not draft else chosen.speculation.drafters
    if now in names and (now == "off" or not chosen.speculation.depth):
        names.remove(now)
    others = (with_changes(chosen, {"speculation": {"drafters": name, "depth": 0}}) for name in names)
    found = tuple(TuningCandidate(drafter_words(other), other) for other in others)
    return TuningChoice("drafters", keys, here, found, test="texts")


def without_what_is_set(choice: TuningChoice, wanted: Settings) -> TuningChoice:
    """Return the choice without candidates where the user's settings, but for `MEASURED` ones, decide it."""
    keys = [key for group in GROUPS if {*group} & {*choice.keys} for key in set_keys(wanted, group)]
    keys = [key for key in keys if key not in MEASURED]
    if choice.skipped or not keys:
        return choice
    what = ", ".join(f"{key.partition('.')[2]} = {value_of(wanted, key)}" for key in keys)
    return dataclasses.replace(choice, candidates=(), skipped=f"set by you: {what}")


def thread_words(topology: Topology, cpus: Iterable[int]) -> str:
    """`8 threads, one per core`, `16 threads, two per core`."""
    used = tuple(cpus)
    cores = {core.index if (core := topology.core_of(cpu)) is not None else -1 - cpu for cpu in used}
    words = plural(len(used), "thread")
    if not topology.smt or len(used) < 2:
        return words
    return f"{words}, {'one' if len(cores) == len(used) else 'two'} per core"


def drafter_words(chosen: Settings) -> str:
    """`auto`, `auto, depth 4`, `off`."""
    depth, drafters = chosen.speculation.depth, chosen.speculation.drafters
    return f"{drafters}, depth {depth}" if depth and drafters != "off" else drafters


def _cpus(topology: Topology, spec: PlacementSpec) -> tuple[int, ...]:
    """Return the CPUs of a placement; () if it is not possible here."""
    try:
        return place(topology, spec).cpus
    except UsageError:
        return ()


def _candidate(words: str, chosen: Settings, **changes: dict[str, Any]) -> TuningCandidate:
    return TuningCandidate(words, with_changes(chosen, changes))
