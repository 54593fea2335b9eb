"""The settings of a loaded model as rows of words: each with its value and the proof that it works."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from cpuchat.bench.results import Environment
from cpuchat.bench.why import SettingFacts, SettingProof, State
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.numa.residency import Residency
from cpuchat.hardware.process import MemoryPages
from cpuchat.models.cpu_modules import AUTO
from cpuchat.present.drafts_off import off_words
from cpuchat.present.machine import kernels_used, module_words, unused_module
from cpuchat.protocol.model_info import LoadEvidence
from cpuchat.protocol.timings import SpeculationFigures
from cpuchat.telemetry import units
from cpuchat.telemetry.units import plural

HEADINGS: Final = ("SETTING", "VALUE", "PROOF")
_HUGE_WORTH: Final = 0.01
"""Share of the memory below which huge pages count as not in use."""


def rows(facts: SettingFacts) -> list[SettingProof]:
    """Return all settings; those without an effect on this machine or this model say so."""
    evidence = facts.model.evidence or LoadEvidence()
    return [*_of_cpus(facts), *_of_memory(facts, evidence), *_of_engine(facts, evidence), _drafters(facts), _row(
        "poll", facts.chosen.engine.poll, "unknown", "how hard idle threads spin before they sleep: leaves no trace"
    )]  # fmt: skip


def _row(name: str, value: object, state: State | bool, proof: str, *, reported: object = True) -> SettingProof:
    """Return a row; `state` True is "works", False "fails". Without anything `reported` its state is unknown."""
    if not reported:
        state, proof = "unknown", "not reported here"
    elif isinstance(state, bool):
        state = "works" if state else "fails"
    return SettingProof(name=name, value=str(value), state=state, proof=proof)


def _of_cpus(facts: SettingFacts) -> Iterator[SettingProof]:
    cpus, found, topology = facts.model.cpus, facts.threads, facts.topology
    allowed = {cpu for one in found for cpu in one.allowed}
    ran_on = {one.ran_on for one in found if one.ran_on is not None}
    pinned = "each pinned to one CPU" if all(len(one.allowed) == 1 for one in found) else "not pinned"
    proof = f"{plural(len(found), 'thread')}, {pinned}: allowed {format_cpu_list(allowed)}, ran on "
    works = allowed == set(cpus) and ran_on <= allowed and len(found) == facts.model.n_threads
    value = f"{facts.model.n_threads} on {format_cpu_list(cpus)}"
    yield _row("threads", value, works, proof + format_cpu_list(ran_on), reported=found)
    if not topology.smt:
        yield _row("SMT siblings", "none", "no effect", "no effect on this machine: one CPU per core")
        return
    n_cores = topology.n_cores(ran_on)
    used, proof = n_cores < len(ran_on), f"{plural(len(ran_on), 'CPU')} of {plural(n_cores, 'core')} ran threads"
    yield _row("SMT siblings", "used" if used else "unused", "works" if used else "off", proof, reported=ran_on)


def _of_memory(facts: SettingFacts, evidence: LoadEvidence) -> Iterator[SettingProof]:
    engine, pages = facts.chosen.engine, facts.pages or MemoryPages()
    yield _memory_policy(facts)
    mapped = sum(facts.residency.weights.values()) if facts.residency is not None else 0
    works = (engine.load_mode == "mmap") == evidence.load_mode.startswith("mmap")
    proof = f"load_mode = {evidence.load_mode}, {units.size(mapped)} of the file mapped"
    yield _row("load mode", engine.load_mode, works, proof, reported=evidence.load_mode)
    huge = pages.huge_anonymous + pages.huge_file
    in_use = huge >= _HUGE_WORTH * pages.resident
    proof = f"{units.size(huge)} of {units.size(pages.resident)} (own {units.size(pages.huge_anonymous)}, files "
    proof = f"{'' if in_use else 'not in use: '}{proof}{units.size(pages.huge_file)})"
    value, otherwise = facts.huge_pages or "?", "off" if facts.huge_pages == "never" else "no effect"
    yield _row("huge pages", value, "works" if in_use else otherwise, proof, reported=facts.pages)
    proof = f"{units.size(pages.locked)} locked"
    works = pages.locked >= 0.95 * facts.model.size if engine.mlock else "off"
    yield _row("lock memory", "on" if engine.mlock else "off", works, proof, reported=facts.pages)


def _memory_policy(facts: SettingFacts) -> SettingProof:
    value, residency = facts.chosen.engine.memory_policy, facts.residency or Residency()
    if len([node for node in facts.topology.nodes if node.memory]) < 2:
        return _row("memory policy", value, "no effect", "no effect on this machine: one NUMA node")
    if facts.engine.policy_refused:
        return _row("memory policy", value, False, f"refused: {facts.engine.policy_refused}")
    wanted, in_force = facts.engine.memory_policy.partition(":")[0], residency.policy or "default"
    works = wanted in ("", "local") or in_force.startswith("prefer" if wanted == "preferred" else wanted)
    return _row("memory policy", value, works, f"{residency.words()}; kernel: {in_force}", reported=residency.words())


def _of_engine(facts: SettingFacts, evidence: LoadEvidence) -> Iterator[SettingProof]:
    engine, weights, module = facts.chosen.engine, evidence.weights, facts.engine.module
    if unused := unused_module(facts.chosen, facts.engine):
        yield _row("CPU module", engine.cpu_module, "no effect", unused.partition(": ")[2])
    if module:
        proof = f"{module_words(facts.engine)}: {', '.join(facts.engine.features)}"
        yield _row("CPU module", engine.cpu_module, engine.cpu_module in (AUTO, module), proof)
    proof, is_off = kernels_used(facts.model, facts.engine, facts.products), engine.kernels == "llama.cpp"
    state: State = "works" if any(one.is_of_cpuchat for one in weights) else "off" if is_off else "no effect"
    yield _row("kernels", engine.kernels, state, proof, reported=weights)
    where = ", ".join(f"{one.buffer} {units.size(one.bytes)} ({one.type})" for one in weights)
    repacked = any(one.is_repacked for one in weights)
    state = "works" if repacked else "no effect" if engine.use_repack else "off"
    proof = (
        f"no effect on this model: no repacked kernel for its types here; {where}" if state == "no effect" else where
    )
    yield _row("repack", "on" if engine.use_repack else "off", state, proof, reported=weights)
    slow = ", ".join(
        f"{kind} ({units.size(sum(one.bytes for one in weights if one.type == kind))})"
        for kind in evidence.scalar_types
    )
    proof = f"SIMD kernels for {', '.join(dict.fromkeys(one.type for one in weights))}"
    proof = f"slow kernel: {slow} without SIMD here; choose Q4_K_M" if slow else proof
    yield _row("tensor types", facts.model.quantization, not slow, proof, reported=weights)
    flash, n_nodes = evidence.flash_nodes, evidence.flash_nodes + evidence.softmax_nodes
    state = "off" if engine.flash_attn == "off" and not flash else "works" if flash else "fails"
    proof = f"in {flash} of {n_nodes} attention nodes of the graph"
    yield _row("flash attention", engine.flash_attn, state, proof, reported=n_nodes)
    k, v = evidence.type_k, evidence.type_v
    works = (k, v) == (engine.type_k, engine.type_v)
    value = "/".join(dict.fromkeys((engine.type_k, engine.type_v)))
    yield _row("KV cache", value, works, f"allocated K {k}, V {v}: {units.size(evidence.kv_bytes)}", reported=k)


def _drafters(facts: SettingFacts) -> SettingProof:
    value, figures = facts.chosen.speculation.drafters, facts.timings.speculation or SpeculationFigures()
    if value == "off":
        return _row("drafters", value, "off", "nothing is drafted")
    if not figures.by_position:
        reason = off_words(figures.off) or "nothing to draft"
        return _row("drafters", value, "no effect", f"no effect on the test answer: {reason}")
    names = ", ".join(one.name for one in figures.by_drafter if one.draft_n)
    proof = f"drafted in {figures.by_position[0][0]} of {figures.passes} passes of the test answer, "
    return _row("drafters", value, True, f"{proof}{figures.draft_n_accepted} of {figures.draft_n} accepted ({names})")


_NARROW: Final = 24  # characters of a column that is not wrapped any more
_MARKS: Final = {"fails": "✗ ", "unknown": "? "}


def wrapped(settings: Sequence[SettingProof], width: int) -> list[tuple[str, ...]]:
    """Return the rows below `HEADINGS` with the proof wrapped so that a table of `width` characters holds them."""
    rows = [(row.name, row.value, _MARKS.get(row.state, "") + row.proof) for row in settings]
    left = max(_NARROW, width - 4 - sum(max(len(row[n]) for row in rows) for n in (0, 1)))
    lines: list[tuple[str, ...]] = []
    for name, value, proof in rows:
        first, *rest = textwrap.wrap(proof, left) or [""]
        lines += [(name, value, first), *(("", "", more) for more in rest)]
    return lines


def about(facts: SettingFacts, environment: Environment) -> list[tuple[str, str]]:
    """Return the machine, the model and the engine's build, each with its label."""
    engine, peak = environment.engine, facts.peak
    about = "≈" if peak is not None and peak.estimated else ""
    return [
        ("Machine", f"{environment.machine}, {units.size(environment.memory_bytes)}"),
        *([("Bandwidth", f"{about}{units.bandwidth(peak.bytes_per_s)} GB/s read, {peak.source}")] if peak else []),
        ("Model", f"{facts.model.name} {facts.model.quantization}"),
        ("Engine", f"llama.cpp {engine.llama_commit}, {' '.join(engine.features)}"),
        ("Date", f"{environment.date}, cpuchat {environment.cpuchat}, Linux {environment.kernel}"),
    ]
