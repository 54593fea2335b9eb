"""Checks of the engine's build against the CPU, and of the available counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cpuchat.hardware.counters.ladder import worth_trying
from cpuchat.hardware.diagnostics.facts import DiagnosticFacts
from cpuchat.hardware.diagnostics.findings import Finding, Level
from cpuchat.hardware.instructions import FEATURES

# How much it matters that the engine was built without a feature that the CPU has; less for the others.
_LEVELS: dict[str, Level] = {
    **dict.fromkeys(("AVX", "AVX2", "FMA", "F16C", "NEON", "DOTPROD"), "problem"),
    **dict.fromkeys(("AVX512", "AVX512_VNNI", "AMX_INT8", "MATMUL_INT8"), "warning"),
}
_REBUILD = "Build it for this machine: `make setup`, or reinstall llama-cpp-python with CMAKE_ARGS=-DGGML_NATIVE=ON."


def engine(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report instruction sets that the CPU has and the engine lacks, and the reverse."""
    if facts.engine is None:
        if facts.engine_error:
            fix = facts.engine_fix or f"Fix this error. If the engine is broken: {_REBUILD[0].lower()}{_REBUILD[1:]}"
            yield Finding("problem", "The engine does not start", facts.engine_error, fix)
        return
    flags, features = facts.topology.flags, set(facts.engine.features)
    if not flags:
        return
    lacking = [name for flag, name in FEATURES.items() if flag in flags and name not in features]
    missing = {name: _LEVELS.get(name, "advice") for name in lacking}
    foreign = [name for flag, name in FEATURES.items() if name in features and flag not in flags]
    has = ", ".join(facts.engine.features) or "no optional features"
    if foreign:
        evidence = f"built with {', '.join(foreign)}, which this CPU lacks; it may crash at any time"
        yield Finding("problem", "The engine was built for another CPU", evidence, _REBUILD)
    for level in ("problem", "warning", "advice"):
        names = [name for name, its in missing.items() if its == level]
        if names:
            evidence = f"the CPU has {', '.join(names)}; the engine has {has}"
            yield Finding(level, f"The engine was built without {', '.join(names)}", evidence, _REBUILD)
    if not missing and not foreign:
        yield Finding("ok", "engine built for this CPU", has)


def counters(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report missing counters: without one, memory traffic is only estimated from the model."""
    if facts.counter:
        yield Finding("ok", "memory counter", f"{facts.counter} available")
        return
    refusals = [one for one in facts.counter_refusals if worth_trying(one, facts.topology)]
    if not refusals or facts.topology.virtual:
        return
    # A module to load is less trouble than a service to install.
    helpful = min(refusals, key=lambda one: one.name == "collector")
    evidence = f"{helpful.name}: {helpful.why}"
    where = "On the host of this container: " if facts.container else ""
    yield Finding(
        "advice", "No counter of memory traffic is available; traffic is estimated from the model", evidence,
        f"{where}{helpful.how} (`cpuchat counters` lists all)",
    )  # fmt: skip


CHECKS: tuple[Callable[[DiagnosticFacts], Iterator[Finding]], ...] = (engine, counters)
