"""Checks of the engine's build against the CPU, and of the counters that tell how near it comes to the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cpuchat.hardware.checkup.facts import Facts
from cpuchat.hardware.checkup.findings import Finding, Level
from cpuchat.hardware.counters.ladder import worth_trying

# Flag in /proc/cpuinfo: (feature as llama.cpp prints it, how much its absence matters).
# ggml/src/ggml-cpu/ggml-cpu.cpp (ggml_backend_cpu_get_features); arch/{x86,arm64}/include/asm/{cpufeatures,hwcap}.h.
_FEATURES: dict[str, tuple[str, Level]] = {
    "avx": ("AVX", "problem"),
    "avx2": ("AVX2", "problem"),
    "avx_vnni": ("AVX_VNNI", "advice"),
    "fma": ("FMA", "problem"),
    "f16c": ("F16C", "problem"),
    "bmi2": ("BMI2", "advice"),
    "avx512f": ("AVX512", "warning"),
    "avx512_vnni": ("AVX512_VNNI", "warning"),
    "avx512_bf16": ("AVX512_BF16", "advice"),
    "avx512vbmi": ("AVX512_VBMI", "advice"),
    "amx_int8": ("AMX_INT8", "warning"),
    "asimddp": ("DOTPROD", "problem"),
    "i8mm": ("MATMUL_INT8", "warning"),
    "asimdhp": ("FP16_VA", "advice"),
}
_REBUILD = "Build it for this machine: `make setup`, or reinstall llama-cpp-python with CMAKE_ARGS=-DGGML_NATIVE=ON."
_SHOWN = 4


def engine(facts: Facts) -> Iterator[Finding]:
    """Instruction sets that the CPU has and the engine was built without, and the other way round."""
    if facts.engine is None:
        if facts.engine_error:
            fix = facts.engine_fix or f"Put that right. If it is the engine itself: {_REBUILD[0].lower()}{_REBUILD[1:]}"
            yield Finding("problem", "The engine does not start", facts.engine_error, fix)
        return
    flags, features = facts.topology.flags, set(facts.engine.features)
    if not flags:
        return
    missing = {name: level for flag, (name, level) in _FEATURES.items() if flag in flags and name not in features}
    foreign = [name for flag, (name, _) in _FEATURES.items() if name in features and flag not in flags]
    has = ", ".join(facts.engine.features) or "no optional features"
    if foreign:
        evidence = f"built with {', '.join(foreign)}, which this CPU does not have; it may end at any moment"
        yield Finding("problem", "The engine was built for another CPU", evidence, _REBUILD)
    for level in ("problem", "warning", "advice"):
        names = [name for name, its in missing.items() if its == level]
        if names:
            evidence = f"the CPU has {', '.join(names)}; the engine has {has}"
            yield Finding(level, f"The engine was built without {', '.join(names)}", evidence, _REBUILD)
    if not missing and not foreign:
        yield Finding("ok", "engine built for this CPU", has)


def counters(facts: Facts) -> Iterator[Finding]:
    """Without a counter there is only the model's own estimate of memory traffic."""
    if facts.counter:
        yield Finding("ok", "memory counter", f"{facts.counter} opens")
        return
    refusals = [one for one in facts.counter_refusals if worth_trying(one, facts.topology)]
    if not refusals or facts.topology.virtual:
        return
    # A module to load is less trouble than a service to install.
    helpful = min(refusals, key=lambda one: one.name == "collector")
    evidence = f"{helpful.name}: {helpful.why}"
    where = "On the host, whose container this is: " if facts.container else ""
    yield Finding(
        "advice", "No counter of memory traffic opens: what is shown is estimated from the model", evidence,
        f"{where}{helpful.how} (`cpuchat counters` lists all)",
    )  # fmt: skip


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (engine, counters)
