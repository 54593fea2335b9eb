"""Lists the candidates of each choice of tuning: settings that may be faster than those in use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import msgspec

from cpuchat.errors import UsageError
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.placement import candidates as placements
from cpuchat.hardware.placement.placement import Placement, PlacementError, PlacementSpec, place
from cpuchat.hardware.topology import Topology
from cpuchat.models.tuned import GROUPS, MEASURED, differences, set_keys, value_of
from cpuchat.protocol import CacheType
from cpuchat.settings import Changes, Settings, with_changes
from cpuchat.telemetry.units import plural

UBATCHES: Final = (128, 256, 512, 1024)
UBATCH_SECONDS: Final = 8.0
DEEP_SECONDS: Final = 3.5
"""Of prefill: attention only weighs with many tokens in the KV cache."""
_QUANTIZED: Final = tuple(name for name in get_args(CacheType) if name not in ("f32", "f16", "bf16"))


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Settings to measure; `words` tell them from the other candidates of a choice."""

    words: str
    settings: Settings


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing to choose.

    `keys`: the settings that it is about. `prompt_seconds`: how long a prompt to measure with, in seconds of prefill.
    `test`: "prefill" where decoding cannot differ, "texts" where what is written matters. `needs_consent`: it changes
    what the model writes, so that it is only offered. `skipped`: why there is nothing to try, "" if there is.
    """

    name: str
    keys: tuple[str, ...]
    now: Candidate
    candidates: tuple[Candidate, ...] = ()
    prompt_seconds: float = 1.5
    test: Literal["both", "prefill", "texts"] = "both"
    needs_consent: bool = False
    skipped: str = ""


def possible(topology: Topology, chosen: Settings) -> Settings:
    """Return the settings without their number of threads where that is more than this machine can run.

    Raises:
        UsageError: cores or memory policy that it does not have.
    """
    try:
        place(topology, PlacementSpec.of(chosen))
    except PlacementError as error:
        if [*error.problems] != ["threads"]:
            raise
        return with_changes(chosen, {"engine": {"threads": 0}})
    return chosen


def thread_choice(topology: Topology, chosen: Settings) -> Choice:
    """Threads and cores: fewer, one for each core, one for each SMT sibling, the cores of each L3 group."""
    now, used = _place(topology, chosen), PlacementSpec.of(chosen)
    found: dict[tuple[int, ...], Candidate] = {}
    n_cores = len(_cpus(topology, PlacementSpec(memory=used.memory)))
    counts = (0, n_cores - 1, math.ceil(0.75 * n_cores), math.ceil(0.5 * n_cores))
    specs = [("auto", n if n != n_cores else 0) for n in dict.fromkeys(counts) if 0 <= n <= n_cores]
    specs += [("all", 0), *_wide(topology)]
    specs += [(one.spec.cores, 0) for one in placements.candidates(topology) if one.spec.cores.endswith("/l3")]
    for cores, threads in specs:
        spec = dataclasses.replace(used, cores=cores, threads=threads)
        cpus = _cpus(topology, spec)
        if cpus and cpus != now.cpus and cpus not in found:
            words = thread_words(topology, cpus)
            if cores.endswith("/l3"):
                words += f", {cores.partition('/')[0]} per L3 group"
            found[cpus] = _candidate(words, chosen, engine={"cores": cores, "threads": threads})
    here = Candidate(thread_words(topology, now.cpus), chosen)
    return Choice("threads", ("engine.threads", "engine.cores"), here, tuple(found.values()))


def memory_choice(topology: Topology, chosen: Settings) -> Choice:
    """The NUMA policy, and the cores of one node with its memory."""
    now, keys = _place(topology, chosen), ("engine.memory",)
    here = Candidate(now.memory.words, chosen)
    if len([node for node in topology.nodes if node.memory]) < 2:
        return Choice("memory policy", keys, here, skipped="one NUMA node")
    found: dict[tuple[object, ...], Candidate] = {}
    policies = ["auto", "local", "interleave", "weighted"]
    specs = [dataclasses.replace(PlacementSpec.of(chosen), memory=policy) for policy in policies]
    one_node = [one.spec for one in placements.candidates(topology) if one.name == placements.ONE_NODE]
    for spec in [*specs, *one_node]:
        try:
            placement = place(topology, spec)
        except UsageError:
            continue
        key = (placement.cpus, placement.memory)
        if key != (now.cpus, now.memory) and key not in found:
            words = f"{placement.memory.words}, {thread_words(topology, placement.cpus)}"
            words = placement.memory.words if placement.cpus == now.cpus else words
            found[key] = _candidate(words, chosen, engine={"cores": spec.cores, "memory": spec.memory,
                                                      "threads": spec.threads})  # fmt: skip
    return Choice("memory policy", keys, here, tuple(found.values()))


def attention_choice(chosen: Settings) -> Choice:
    """Flash attention on or off; `auto` turns it on."""
    engine, keys = chosen.engine, ("engine.flash_attn",)
    here = Candidate(engine.flash_attn, chosen)
    if engine.cache_type_v in _QUANTIZED:
        return Choice("flash attention", keys, here, skipped=f"a V cache of type {engine.cache_type_v} needs it")
    other = "auto" if engine.flash_attn == "off" else "off"
    return Choice("flash attention", keys, here, (_candidate(other, chosen, engine={"flash_attn": other}),),
                  DEEP_SECONDS)  # fmt: skip


def ubatch_choice(chosen: Settings, most_tokens: int) -> Choice:
    """The micro-batch, at most what a prompt of `most_tokens` fills."""
    now = min(chosen.engine.ubatch, chosen.engine.batch)
    sizes = [n for n in UBATCHES if n != now and n <= most_tokens]
    found = tuple(
        _candidate(str(n), chosen, engine={"ubatch": n, "batch": max(n, Settings().engine.batch)}) for n in sizes
    )
    keys, here = ("engine.ubatch", "engine.batch"), Candidate(str(now), chosen)
    if not found:
        return Choice("micro-batch", keys, here, skipped="prefill is too slow to measure long prompts")
    return Choice("micro-batch", keys, here, found, UBATCH_SECONDS, test="prefill")


def kv_choice(chosen: Settings) -> Choice:
    """A KV cache of 8 bits; quantized types change what the model writes."""
    engine, keys = chosen.engine, ("engine.cache_type_k", "engine.cache_type_v")
    here = Candidate(kv_words(chosen), chosen)
    if engine.flash_attn == "off":
        return Choice("KV cache", keys, here, skipped="a quantized V cache needs flash attention, which is off")
    if engine.cache_type_k in _QUANTIZED or engine.cache_type_v in _QUANTIZED:
        other = _candidate("f16", chosen, engine={"cache_type_k": "f16", "cache_type_v": "f16"})
        return Choice("KV cache", keys, here, (other,), DEEP_SECONDS)
    other = _candidate("q8_0", chosen, engine={"cache_type_k": "q8_0", "cache_type_v": "q8_0"})
    return Choice("KV cache", keys, here, (other,), DEEP_SECONDS, needs_consent=True)


def drafter_choice(chosen: Settings, draft: str) -> Choice:
    """All drafters, those that need no draft model, none; with adaptive depth. `draft` names the draft model, "" for
    none."""
    keys, here = ("speculation.drafters", "speculation.depth"), Candidate(drafter_words(chosen), chosen)
    known, found = {_drafting(chosen, draft)}, list[Candidate]()
    for drafters in ("auto", "free", "off"):
        other = with_changes(chosen, {"speculation": {"drafters": drafters, "depth": 0}})
        if _drafting(other, draft) not in known:
            known.add(_drafting(other, draft))
            found.append(Candidate(drafter_words(other), other))
    return Choice("drafters", keys, here, tuple(found), test="texts")


def _drafting(chosen: Settings, draft: str) -> tuple[object, ...]:
    """Return which of the drafters can draft, and how deep."""
    section = chosen.speculation
    names = [name for name in section.speculation().drafters if draft or name != "draft"]
    return tuple(names), section.depth if names else 0


def without_what_is_set(choice: Choice, wanted: Settings) -> Choice:
    """Return the choice without candidates where the user's settings decide it: of these, only `MEASURED` ones are
    replaced."""
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


def kv_words(chosen: Settings) -> str:
    k, v = chosen.engine.cache_type_k, chosen.engine.cache_type_v
    return k if k == v else f"{k}/{v}"


def drafter_words(chosen: Settings) -> str:
    """`auto`, `auto, depth 4`, `off`."""
    depth, drafters = chosen.speculation.depth, chosen.speculation.drafters
    return f"{drafters}, depth {depth}" if depth and drafters != "off" else drafters


def changed_keys(before: Settings, after: Settings) -> tuple[str, ...]:
    """Return the settings that differ, such as "engine.threads"."""
    return tuple(f"{section}.{name}" for section, values in differences(before, after).items() for name in values)


def _wide(topology: Topology) -> list[tuple[str, int]]:
    """Return all logical CPUs, where some share a core."""
    allowed = set(topology.allowed)
    shared = any(len(allowed.intersection(core.cpus)) > 1 for core in topology.allowed_cores)
    return [(format_cpu_list(topology.allowed), 0)] if shared else []


def _place(topology: Topology, chosen: Settings) -> Placement:
    return place(topology, PlacementSpec.of(chosen))


def _cpus(topology: Topology, spec: PlacementSpec) -> tuple[int, ...]:
    """Return the CPUs of a placement; () if it is not possible here."""
    try:
        return place(topology, spec).cpus
    except UsageError:
        return ()


def _candidate(words: str, chosen: Settings, **changes: dict[str, Any]) -> Candidate:
    merged: Changes = dict(changes)
    return Candidate(words, msgspec.convert(msgspec.to_builtins(with_changes(chosen, merged)), Settings))
