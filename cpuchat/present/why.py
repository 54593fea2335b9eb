"""The settings of a loaded model as rows of words: each with its value, the proof that it works, and its worth."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Final

from cpuchat.config.settings import Settings
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.numa.residency import share_words
from cpuchat.measure.answer import percent
from cpuchat.protocol.model_info import BufferWeights, LoadEvidence
from cpuchat.telemetry import units
from cpuchat.telemetry.units import plural
from cpuchat.why.report import Rate, SettingFacts, SettingRow, State, WhyReport, Worth

HEADINGS: Final = ("SETTING", "VALUE", "PROOF", "WORTH")
NOTE: Final = (
    "Worth: how much faster it is with the setting than with the alternative, measured in turn; ± two standard errors; "
    "≈ not significant."
)
_KERNEL_POLICIES: Final = {"weighted": "weighted interleave", "preferred": "prefer"}
_NOT_LOGGED: Final = "llama.cpp did not log it"
_HUGE_WORTH: Final = 0.01
"""Share of the memory below which huge pages count as not in use."""


def rows(facts: SettingFacts) -> list[SettingRow]:
    """Return all settings; those without an effect on this machine or this model say so."""
    proofs: tuple[Callable[[SettingFacts, LoadEvidence], SettingRow], ...] = (
        _threads, _siblings, _memory_policy, _repack, _tensor_types, _load_mode, _huge_pages, _lock, _flash_attention,
        _kv_types, _drafters, _poll,
    )  # fmt: skip
    evidence = facts.model.evidence or LoadEvidence()
    return [proof(facts, evidence) for proof in proofs]


def _row(name: str, value: object, state: State, proof: str) -> SettingRow:
    return SettingRow(name=name, value=str(value), state=state, proof=proof)


def _threads(facts: SettingFacts, evidence: LoadEvidence) -> SettingRow:
    cpus, found = facts.model.cpus, facts.threads
    value = f"{facts.model.n_threads} on {format_cpu_list(cpus)}"
    if not found:
        return _row("threads", value, "unknown", "/proc does not show the worker's threads")
    allowed = {cpu for one in found for cpu in one.allowed}
    pinned = all(len(one.allowed) == 1 for one in found)
    ran_on = {one.ran_on for one in found if one.ran_on is not None}
    proof = (
        f"{plural(len(found), 'thread')}, {'each pinned to one CPU' if pinned else 'not pinned'}: allowed "
        f"{format_cpu_list(allowed)}, ran on {format_cpu_list(ran_on)}"
    )
    works = allowed == set(cpus) and ran_on <= allowed and len(found) == facts.model.n_threads
    return _row("threads", value, "works" if works else "fails", proof)


def _siblings(facts: SettingFacts, _: LoadEvidence) -> SettingRow:
    topology, cpus = facts.topology, {one.ran_on for one in facts.threads if one.ran_on is not None}
    n_cores = topology.n_cores(cpus or facts.model.cpus)
    if not topology.smt:
        return _row("SMT siblings", "none", "no effect", "no effect on this machine: one CPU per core")
    both = n_cores < len(cpus or facts.model.cpus)
    proof = f"{plural(len(cpus), 'CPU')} of {plural(n_cores, 'core')} ran threads"
    return _row("SMT siblings", "used" if both else "unused", "works" if both else "off", proof)


def _memory_policy(facts: SettingFacts, _: LoadEvidence) -> SettingRow:
    value, residency = facts.chosen.engine.memory, facts.residency
    if len([node for node in facts.topology.nodes if node.memory]) < 2:
        return _row("memory policy", value, "no effect", "no effect on this machine: one NUMA node")
    if facts.engine.memory_refused:
        return _row("memory policy", value, "fails", f"refused: {facts.engine.memory_refused}")
    if residency is None or not (residency.weights or residency.large):
        return _row("memory policy", value, "unknown", "the kernel does not tell where the pages are")
    parts = [("mapped weights", residency.weights), ("large buffers", residency.large)]
    words = "; ".join(f"{name} {share_words(nodes)}" for name, nodes in parts if nodes)
    in_force = residency.policy or "default"
    wanted = facts.engine.memory.partition(":")[0]
    applied = wanted in ("", "local") or in_force.startswith(_KERNEL_POLICIES.get(wanted, wanted))
    return _row("memory policy", value, "works" if applied else "fails", f"{words}; kernel: {in_force}")


def _in_buffers(weights: Iterable[BufferWeights]) -> str:
    """`CPU_REPACK 626 MB (q4_K), CPU_Mapped 486 MB (q6_K, q4_K, f32)`."""
    buffers: dict[str, list[BufferWeights]] = {}
    for one in weights:
        buffers.setdefault(one.buffer, []).append(one)
    return ", ".join(
        f"{name} {units.size(sum(one.bytes for one in held))} ({', '.join(one.type for one in held)})"
        for name, held in buffers.items()
    )


def _repack(facts: SettingFacts, evidence: LoadEvidence) -> SettingRow:
    value = "on" if facts.chosen.engine.use_repack else "off"
    if not evidence.weights:
        return _row("repack", value, "unknown", "this build does not show its buffers")
    where = _in_buffers(evidence.weights)
    if any("REPACK" in one.buffer or "AMX" in one.buffer for one in evidence.weights):
        return _row("repack", value, "works", where)
    if value == "off" or facts.chosen.engine.from_disk:
        return _row("repack", value, "off", where)
    return _row(
        "repack", value, "no effect", f"no effect on this model: no repacked kernel for its types here; {where}"
    )


def _tensor_types(facts: SettingFacts, evidence: LoadEvidence) -> SettingRow:
    value = facts.model.quantization
    slow, sizes = evidence.scalar_types, dict.fromkeys((one.type for one in evidence.weights), 0)
    for one in evidence.weights:
        sizes[one.type] += one.bytes
    if not sizes:
        return _row("tensor types", value, "unknown", "this build does not show its weights")
    if slow:
        what = ", ".join(f"{kind} ({units.size(sizes[kind])})" for kind in slow)
        return _row("tensor types", value, "fails", f"slow kernel: {what} without SIMD here; choose Q4_K_M")
    return _row("tensor types", value, "works", f"SIMD kernels for {', '.join(sizes)}")


def _load_mode(facts: SettingFacts, evidence: LoadEvidence) -> SettingRow:
    value = facts.chosen.engine.load_mode
    if not evidence.load_mode:
        return _row("load mode", value, "unknown", _NOT_LOGGED)
    mapped = sum(facts.residency.weights.values()) if facts.residency is not None else 0
    pages = f", {units.size(mapped)} of the file mapped" if facts.residency is not None else ""
    works = (value == "mmap") == evidence.load_mode.startswith("mmap")
    return _row("load mode", value, "works" if works else "fails", f"llama.cpp: {evidence.load_mode}{pages}")


def _huge_pages(facts: SettingFacts, _: LoadEvidence) -> SettingRow:
    value, pages = facts.huge_pages or "unknown", facts.pages
    if pages is None:
        return _row("huge pages", value, "unknown", "no /proc/PID/smaps_rollup")
    huge = pages.huge_anonymous + pages.huge_file
    proof = f"{units.size(huge)} of {units.size(pages.resident)} (own {units.size(pages.huge_anonymous)}, "
    proof += f"files {units.size(pages.huge_file)})"
    if huge >= _HUGE_WORTH * pages.resident:
        return _row("huge pages", value, "works", proof)
    return _row("huge pages", value, "off" if value == "never" else "no effect", f"not in use: {proof}")


def _lock(facts: SettingFacts, _: LoadEvidence) -> SettingRow:
    locked = facts.pages.locked if facts.pages is not None else 0
    if not facts.chosen.engine.mlock:
        return _row("lock memory", "off", "off", "nothing is locked")
    if facts.pages is None:
        return _row("lock memory", "on", "unknown", "no /proc/PID/smaps_rollup")
    works: State = "works" if locked >= 0.95 * facts.model.size else "fails"
    return _row("lock memory", "on", works, f"{units.size(locked)} locked of {units.size(facts.model.size)}")


def _flash_attention(facts: SettingFacts, evidence: LoadEvidence) -> SettingRow:
    value, flash, plain = facts.chosen.engine.flash_attn, evidence.flash_nodes, evidence.softmax_nodes
    if not flash + plain:
        return _row("flash attention", value, "unknown", _NOT_LOGGED)
    proof = f"in {flash} of {flash + plain} attention nodes of the graph"
    if value == "off":
        return _row("flash attention", value, "off" if not flash else "fails", proof)
    return _row("flash attention", value, "works" if flash else "fails", proof)


def kv_types(chosen: Settings) -> str:
    """`f16`, or K and V apart: `q8_0/f16`."""
    k, v = chosen.engine.type_k, chosen.engine.type_v
    return k if k == v else f"{k}/{v}"


def _kv_types(facts: SettingFacts, evidence: LoadEvidence) -> SettingRow:
    value = kv_types(facts.chosen)
    if not evidence.type_k:
        return _row("KV cache", value, "unknown", _NOT_LOGGED)
    engine = facts.chosen.engine
    works = (evidence.type_k, evidence.type_v) == (engine.type_k, engine.type_v)
    proof = f"allocated K {evidence.type_k}, V {evidence.type_v}: {units.size(evidence.kv_bytes)}"
    return _row("KV cache", value, "works" if works else "fails", proof)


def _drafters(facts: SettingFacts, _: LoadEvidence) -> SettingRow:
    value, figures = facts.chosen.speculation.drafters, facts.timings.speculation
    if value == "off":
        return _row("drafters", value, "off", "nothing is drafted")
    if figures is None:
        return _row("drafters", value, "unknown", "the engine reported no figures")
    n_drafted = figures.by_position[0][0] if figures.by_position else 0
    proof = f"drafted in {n_drafted} of {figures.passes} passes of the test answer"
    if not n_drafted:
        reason = figures.reason.removeprefix("off: ") or "nothing to draft"
        return _row("drafters", value, "no effect", f"no effect on this answer: {reason}")
    names = ", ".join(one.name for one in figures.by_drafter if one.draft_n)
    accepted = f"{figures.draft_n_accepted} of {figures.draft_n} tokens accepted"
    return _row("drafters", value, "works", f"{proof}, {accepted} ({names})")


def _poll(facts: SettingFacts, _: LoadEvidence) -> SettingRow:
    return _row("poll", facts.chosen.engine.poll, "unknown", "leaves no trace; --measure shows its worth")


_NARROW: Final = 24  # characters of a column that is not wrapped any more
_MARKS: Final = {"fails": "✗ ", "unknown": "? "}


def table_rows(report: WhyReport) -> list[tuple[str, ...]]:
    """Return the rows of the table below `HEADINGS`."""
    return [
        (row.name, row.value, _MARKS.get(row.state, "") + row.proof, worth_words(row.worth)) for row in report.settings
    ]


def wrapped(rows: Sequence[Sequence[str]], width: int) -> list[tuple[str, ...]]:
    """Return the rows with proof and worth wrapped so that a table of `width` characters holds them."""
    left = width - 6 - sum(max(len(row[n]) for row in rows) for n in (0, 1))
    for_worth = min(max(1, *(len(row[3]) for row in rows)), max(_NARROW, left // 2))
    for_proof = max(_NARROW, left - for_worth)
    lines: list[tuple[str, ...]] = []
    for name, value, proof, worth in rows:
        texts = zip_longest(textwrap.wrap(proof, for_proof), textwrap.wrap(worth, for_worth), fillvalue="")
        lines += [(name, value, *pair) if not n else ("", "", *pair) for n, pair in enumerate(texts)]
    return lines


def worth_words(worth: Worth | None) -> str:
    """`decode +12.3 % ± 1.0 %, prefill +80.1 % ± 3.2 % over 1 thread`."""
    if worth is None or worth.skipped:
        return f"not measured: {worth.skipped}" if worth is not None else ""
    rates = (("decode", worth.decode), ("prefill", worth.prefill))
    words = ", ".join(f"{name} {_rate(rate)}" for name, rate in rates if rate is not None)
    return f"{words} over {worth.alternative}{' (machine was busy)' if worth.noisy else ''}"


def _rate(rate: Rate) -> str:
    return f"{'' if rate.is_sure else '≈ '}{percent(rate.gain)} ± {200 * rate.error:.1f} %"


def about(report: WhyReport) -> list[tuple[str, str]]:
    """Return the machine, the model, the engine's build and the command, each with its label."""
    environment = report.environment
    features = " ".join(environment.engine.features)
    return [
        ("Machine", f"{environment.machine}, {units.size(environment.memory_bytes)}"),
        ("Model", f"{report.model} {report.quantization}"),
        ("Engine", f"llama.cpp {environment.engine.llama_commit}, {features}"),
        ("Date", f"{environment.date}, cpuchat {environment.cpuchat}, Linux {environment.kernel}"),
        ("Command", report.command),
    ]


def markdown(report: WhyReport) -> str:
    """Return the report as a Markdown page."""
    cells = [HEADINGS, ("---",) * len(HEADINGS), *table_rows(report)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join([*(f"- {label}: {text}" for label, text in about(report)), "", *lines, "", NOTE, ""])
