"""Plans in words: what a model would do on a machine, and tables of models and machines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.base import paths
from cpuchat.models.fit import gigabytes
from cpuchat.models.library.places import is_demo
from cpuchat.protocol.messages import MAX_PARALLEL
from cpuchat.telemetry import units
from cpuchat.telemetry.roofline import NO_LIMIT

if TYPE_CHECKING:
    from cpuchat.costs.usual import Figure
    from cpuchat.planner.plan import CapacityPlan, MachineSpec, PlannedWorkload, Range

CATALOG_HEADS = ("MODEL", "QUANT", "SIZE", "TOK/S", "RANGE", "FIRST TOKEN")
MACHINE_HEADS = ("MACHINE", "BANDWIDTH", "TOK/S", "RANGE", "CODE, DRAFT", "USERS")
CODE = 0.8
"""The acceptance rate per token at which a draft model is compared: that of code."""
_FIT_ELSEWHERE = "Add `--on all` for the machines that it fits, or name a smaller quantization, such as Q3_K_M."
Lines = list[tuple[str, str]]
"""Labels and texts."""


def rates(figure: Range | None, words: Callable[[float], str] = units.about) -> str:
    """`6.3 (5.3–7.2)`; one number where it is certain; "n/a" when unknown."""
    if figure is None:
        return "n/a"
    return words(figure.value) + (f" ({_span(figure, words)})" if figure.low < figure.high else "")


def _span(figure: Range, words: Callable[[float], str] = units.about) -> str:
    return f"{words(figure.low)}–{words(figure.high)}"


def seconds(figure: Range) -> str:
    """`3.2 s (2.1–4.9)`."""
    return f"{_seconds_of(figure.value)} s ({_seconds_of(figure.low)}–{_seconds_of(figure.high)})"


def _seconds_of(value: float) -> str:
    """Return seconds with three digits or so."""
    return f"{value:.{3 if value < 0.1 else 2}f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def title(plan: CapacityPlan) -> str:
    """`70B Q4_K_M on EPYC 9754`."""
    return f"{plan.model.name} {plan.model.quantization} on {plan.machine.name}"


def lines(plan: CapacityPlan) -> Lines:
    """Return the plan as labels and texts."""
    found = [("file", f"{paths.shown(Path(plan.model.path))}, which is here")] if plan.model.path else []
    found.append(("memory", plan.memory.explained))
    if plan.tok_s is None:
        elsewhere = [("", _FIT_ELSEWHERE)] if plan.verdict == "too large" else []
        return [*found, ("tok/s", f"n/a: {plan.why_not}"), *elsewhere]
    assert plan.ttft_s is not None  # all figures are there when one is
    machine = plan.machine
    per_token, sign = units.size(round(plan.bytes_per_token)), "≈" if doubt(machine) else "≤"
    limits = NO_LIMIT
    if plan.memory_ceiling is not None:
        reading, computing = (rates(one, units.rate) for one in (plan.memory_ceiling, plan.compute_ceiling))
        limits = f"reading {sign} {reading}, computing {sign} {computing} tok/s"
    found += [
        ("tok/s", f"{rates(plan.tok_s)}, plain decoding"),
        ("", f"{_decoding(plan)} ÷ {per_token} per token; {units.takes(plan.limit, plan.limit_share)}"),
        (
            "first token",
            f"{seconds(plan.ttft_s)}, prompt of {plan.workload.n_prompt:,} tokens at {rates(plan.prefill_tok_s)} tok/s",
        ),
        ("ceilings", limits),
    ]
    found += [*_draft_lines(plan), *_shared(plan)]
    if plan.usd_per_million is not None:
        together = plan.shared_usd_per_million
        shared = f", ${together.value:.2f} with all of these users" if together is not None else ""
        found.append(("cost", f"${plan.usd_per_million.value:.2f} per million tokens for one chat{shared}"))
    return found


def _decoding(plan: CapacityPlan) -> str:
    """`300 (250–340) GB/s of 367`; `17 (8–26) GB/s of 20 (10–30)` of an estimate, unless passes say more than that."""
    machine, read, rate = plan.machine, plan.machine.read_gbs, plan.read_rate
    assert rate is not None  # with tok_s
    shown = f"{rates(rate, units.bandwidth)} GB/s"
    if plan.in_cache or rate.low >= 1e9 * read.at("high") or (machine.fitted is not None and read.basis != "measured"):
        return shown + " (from L3)" * plan.in_cache
    span = f" ({_gbs(read.low)}–{_gbs(read.high)})" if read.low and read.high else " or more"
    about = span if machine.free_gb is not None and read.high else ""
    return f"{shown} of {_gbs(read.value)}{about}"


def _gbs(value: float) -> str:
    return units.bandwidth(1e9 * value)


def doubt(machine: MachineSpec) -> str:
    """Return what is to be said of a bandwidth that is an estimate for this machine; "" for others."""
    read = machine.read_gbs
    if machine.free_gb is None or read.basis != "estimate" or machine.fitted is not None:
        return ""
    known = f"is {read.source}" if read.low else "may be higher than was measured so far"
    return f" The bandwidth {known} (`cpuchat probe`, 30 s)."


def _draft_lines(plan: CapacityPlan) -> Lines:
    if plan.draft is None:
        why = "rarely pays: a verify pass reads the experts of all of its tokens"
        return [("draft model", why)] if plan.model.work.is_moe else []
    found = [("draft model", f"{plan.draft.name} {plan.draft.quantization}; α: acceptance rate")]
    for one in plan.drafted:
        gain = f"{rates(one.tok_s)}, {one.speedup.value:.1f}×, depth {one.depth}" if one.depth else "no gain"
        found.append((f"α {one.acceptance:g}", gain))
    if plan.draft_ceiling is not None:
        found.append(("α 1", f"{rates(plan.draft_ceiling)}, the ceiling"))
    if not plan.drafted:
        found.append(("", "n/a: its weights have no SIMD kernel on this CPU"))
    elif not any(one.pays for one in plan.drafted):
        demo = ". The demo loads it to show drafting" if is_demo(Path(plan.model.path)) else ""
        found.append(("", f"Off is recommended: the best gain is under 10 %{demo}."))
    return found


def _shared(plan: CapacityPlan) -> Lines:
    tok_s, users = plan.workload.tok_s, plan.users
    if users is None or plan.shared_tok_s is None:
        return []
    if users.value < 1:
        return [("users", f"0 at {tok_s:g} tok/s each: one chat alone does not reach that")]
    limit = f", memory for {plan.users_by_memory}" if plan.users_by_memory <= users.high else ""
    together = f"{rates(plan.shared_tok_s)} tok/s together"
    found = [("users", f"{rates(users, '{:.0f}'.format)} at {tok_s:g} tok/s each, {together}{limit}")]
    if users.value >= 2:
        at_once = min(round(users.value), MAX_PARALLEL)
        found.append(("", f"`cpuchat serve --parallel {at_once}` answers {at_once} at once"))
    return found


def catalog_row(plan: CapacityPlan) -> tuple[str, ...]:
    """Return a line of the catalog on a machine, as of `CATALOG_HEADS`; `marks` explains its marks."""
    assert plan.tok_s is not None and plan.ttft_s is not None  # only models that fit are listed
    marks = f"{' ○' * bool(plan.model.path)}{' !' * (plan.verdict == 'not free')}"
    return (
        plan.model.name + marks,
        plan.model.quantization,
        units.size(round(plan.model.size)),
        units.about(plan.tok_s.value),
        _span(plan.tok_s),
        f"{_seconds_of(plan.ttft_s.value)} s",
    )


def not_free(available: int) -> str:
    """Return what keeps models from being loaded now that a machine with `available` bytes free could run."""
    return f"needs more than the {gigabytes(available)} GB that are free now: close other programs."


def marks(plans: Sequence[CapacityPlan]) -> str:
    """Return what the marks in these plans' lines mean."""
    found = " ○ is here, and planned from its file." if any(plan.model.path for plan in plans) else ""
    waiting = next((plan.memory for plan in plans if plan.verdict == "not free"), None)
    return found + (f" ! {not_free(waiting.available)}" if waiting is not None else "")


def machine_row(plan: CapacityPlan) -> tuple[str, ...]:
    """Return a line of a model on all machines, as of `MACHINE_HEADS`."""
    code = next((one for one in plan.drafted if one.acceptance == CODE), None)
    cells = (plan.machine.name, f"{_gbs(plan.machine.read_gbs.value)} GB/s")
    if plan.tok_s is None or plan.users is None:
        return (*cells, plan.verdict, "", "", "")
    return (
        *cells,
        units.about(plan.tok_s.value),
        _span(plan.tok_s),
        units.about(code.tok_s.value) if code is not None else "",
        f"{plan.users.value:.0f}",
    )


def machine_legend(workload: PlannedWorkload) -> str:
    """Return what the columns of `MACHINE_HEADS` mean."""
    each = f"each at {workload.tok_s:g} tok/s or more"
    return f"TOK/S: plain decoding of one chat; CODE, DRAFT: with a draft model. USERS: chats decoded together, {each}."


def machine_figures(machine: MachineSpec) -> Lines:
    """Return every figure of a machine that is not here, with its basis and source."""
    figures: list[tuple[str, Figure | None, str]] = [
        ("cores", machine.cores, ""),
        ("clock", machine.clock_ghz, " GHz"),
        ("memory", machine.memory_gb, " GB"),
        ("theoretical peak", machine.theoretical, " GB/s"),
        ("read bandwidth", machine.read_gbs, " GB/s"),
        ("L3", machine.l3_mb, " MB"),
    ]
    found = [(name, _figure(one, unit)) for name, one, unit in figures if one is not None]
    low, high = machine.decode_gbs("low"), machine.decode_gbs("high")
    found.append(("decoding reads", f"{_gbs(low)}–{_gbs(high)} GB/s ({machine.decode_source})"))
    return found


def _figure(figure: Figure, unit: str) -> str:
    span = f" ({figure.low:g}–{figure.high:g})" if figure.low and figure.high else ""
    is_told = figure.source.startswith((figure.basis, "of "))  # of a probe: `measured, 2 cores`; else `of lab.toml`
    is_exact = figure.basis != "measured" or figure.value == int(figure.value)
    value = f"{figure.value:,g}" if is_exact else units.rate(figure.value)
    return f"{value}{unit}{span}, " + (figure.source if is_told else f"{figure.basis}: {figure.source}")
