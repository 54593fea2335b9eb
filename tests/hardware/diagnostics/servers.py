"""A server without problems to examine, and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cpuchat.hardware.bandwidth.read_bandwidth import ReadBandwidth, remember
from cpuchat.hardware.diagnostics import DiagnosticFacts, Finding, WantedSetup, examine, gather_facts
from cpuchat.protocol.model_info import EngineInfo
from tests.hardware.counters.simulated import Simulated

ENGINE = EngineInfo(
    version="0.3.36",
    llama_commit="0c1e570",
    features=("AVX", "AVX2", "F16C", "FMA", "AVX512", "AVX512_VNNI", "AVX512_BF16", "LLAMAFILE"),
)


def read_rate(root: Path, gigabytes: float, cpus: Sequence[int] = range(32)) -> None:
    """Set the measured read bandwidth."""
    rate = gigabytes * 1e9
    remember(ReadBandwidth(tuple(cpus), rate, (rate, rate, rate)), "local", root=root)


def facts_of(root: Path, engine: EngineInfo | None = ENGINE, **settings: str | int) -> DiagnosticFacts:
    wanted = WantedSetup(**settings)  # type: ignore[arg-type]
    return gather_facts(wanted, engine=engine, kernel=Simulated().calls, refused=lambda words: "", root=root)


def found(facts: DiagnosticFacts, title: str) -> Finding:
    findings = [finding for finding in examine(facts) if title in finding.title]
    assert len(findings) == 1, [finding.title for finding in examine(facts)]
    return findings[0]
