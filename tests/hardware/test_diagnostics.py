"""Tests the findings, on simulated machines that are read like a real one: their level, their figure, what to do."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cpuchat.base.errors import CpuchatError
from cpuchat.hardware.diagnostics import ORDER, DiagnosticFacts, Finding, examine, gather_facts, refused_policy
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.measure.peak import ReadBandwidth, keep, known_of
from cpuchat.protocol.model_info import EngineInfo
from tests.hardware.counters.simulated import Simulated, refused, umc
from tests.hardware.trees import cpuinfo, make_tree, status, write

pytestmark = pytest.mark.slow

ENGINE = EngineInfo(
    version="0.3.36",
    llama_commit="0c1e570",
    features=("AVX", "AVX2", "F16C", "FMA", "AVX512", "AVX512_VNNI", "AVX512_BF16", "LLAMAFILE"),
)
CPUFREQ = "sys/devices/system/cpu/cpu{}/cpufreq"
THP = "sys/kernel/mm/transparent_hugepage/enabled"
BALANCING = "proc/sys/kernel/numa_balancing"
CPUINFO = "proc/cpuinfo"
BIG = {"model": "big.gguf", "model_bytes": 400_000_000_000}
TWO = "2x-epyc-7543"


def masked(flags: str) -> str:
    """Return a Sapphire Rapids with these flags only."""
    return cpuinfo("Intel Xeon Processor", "GenuineIntel", 6, 143, flags, range(1))


def read_rate(root: Path, gigabytes: float, cpus: Sequence[int] = range(32)) -> None:
    """Set the measured read bandwidth."""
    rate = gigabytes * 1e9
    keep(ReadBandwidth(tuple(cpus), rate, (rate, rate, rate)), "local", root=root)


def facts_of(root: Path, engine: EngineInfo | None = ENGINE, refused: str = "", **settings: Any) -> DiagnosticFacts:
    model = {name: settings.pop(name) for name in ("model", "model_bytes") if name in settings}
    return gather_facts(
        PlacementSpec(**settings), engine=engine, kernel=Simulated().calls, refused=lambda words: refused,
        known=known_of, root=root, **model,
    )  # fmt: skip


def found(facts: DiagnosticFacts, title: str) -> Finding:
    findings = [finding for finding in examine(facts) if title in finding.title]
    assert len(findings) == 1, [finding.title for finding in examine(facts)]
    return findings[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a server without problems: EPYC 9354, a counter, measured."""
    root = make_tree(tmp_path, "epyc-9354")
    read_rate(root, 378.2)
    umc(root, 0, "0")
    return write(root, {"proc/loadavg": "0.52 0.58 0.59 2/1234 5678"})


def test_a_machine_with_nothing_wrong(root: Path) -> None:
    findings = examine(facts_of(root))
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert {finding.title: finding.evidence for finding in findings} == {
        "engine built for this CPU": "AVX, AVX2, F16C, FMA, AVX512, AVX512_VNNI, AVX512_BF16, LLAMAFILE",
        "one thread per core": "32 threads on 32 cores",
        "other load": "load average 0.5 over the last minute, 32 cores",
        "governor": "performance",
        "boost": "on",
        "read bandwidth": "378 of 461 GB/s (82 %, measured, 32 cores); "
        "assumed: 12 channels × 4800 MT/s, the maximum of EPYC 9354",
        "NPS1": "1 socket as 1 NUMA node",
        "huge pages": "madvise",
        "memory": "309 GB of 412 GB available",
    }


@pytest.mark.parametrize(
    ("name", "files", "settings", "wanted"),
    [
        ("epyc-9354", {}, {"cores": "0-3,32-33"}, ("warning", "SMT siblings", "4 of 6 threads share a core", "auto")),
        ("container", {}, {}, ("warning", "CPU quota", "cgroup CPU quota: 6.5, 8 cores", "--cpuset-cpus")),
        ("container", {}, {"threads": 8}, ("problem", "quota is below the thread", "8 threads", "engine.threads to 0")),
        ("epyc-9354", {"sys/fs/cgroup/cpu.max": "3200000 100000"}, {}, ("ok", "CPU quota", "32 CPUs for 32", "")),
        ("epyc-9354", {}, {"cores": "l3:99"}, ("problem", "cores cannot be used", "99", "auto")),
        ("epyc-9354", {}, {"threads": 65}, ("problem", "cores cannot be used", "65", "auto")),
        ("epyc-9354", {}, {"memory_policy": "bind:7"}, ("problem", "configured memory policy", "bind:7", "auto")),
        (TWO, {}, {"refused": "not permitted"}, ("warning", "not in effect", "interleave:0-1: not perm", "SYS_NICE")),
        (TWO, {}, {}, ("problem", "another CPU", "AVX512, AVX512_VNNI, AVX512_BF16, which this", "make setup")),
        ("epyc-9354", {"proc/loadavg": "40.1 1 1 2/3 4"}, {}, ("warning", "use the cores", "40.1", "top")),
        ("epyc-9354", {"proc/loadavg": "20.0 1 1 2/3 4"}, {}, ("advice", "use the cores", "20.0", "top")),
        ("container", {"proc/loadavg": "9.5 1 1 2/3 4"}, {}, ("ok", "other load", "9.5 over the last minute, 32", "")),
        ("vm", {}, {}, ("advice", "topology is unverified", "2 L3 groups × 4 cores", "probe")),
        pytest.param(
            "vm", {CPUINFO: masked("fpu avx hypervisor")}, {},
            ("problem", "machine hides AVX2, FMA, AVX512, AVX512_VNNI", "Sapphire Rapids usually has", "-cpu host"),
            id="by a hypervisor"),
        pytest.param(
            "xeon-6430", {CPUINFO: masked("avx2 fma avx512f avx512_vnni avx512_bf16")}, {},
            ("warning", "The system hides AMX_INT8", "usually has it", "kernel"), id="by firmware"),
        (TWO, {BALANCING: "1"}, {}, ("warning", "NUMA balancing: on", "Fewer page faults", "`NUMA balancing`")),
        (TWO, {BALANCING: "0"}, {}, ("ok", "NUMA balancing", "off", "")),
        ("container", {THP: "always madvise [never]"}, {}, ("advice", "huge pages: never", "12 %", "administrator")),
        ("vm", {THP: "always madvise [never]"}, {}, ("advice", "huge pages: never", "12 %", "under `huge pages`")),
        ("epyc-9354p-nps4", {}, {}, ("advice", "NPS4", "1 socket as 4 NUMA nodes", "NPS1")),
        ("epyc-9654", {}, {}, ("advice", "has not been measured", "utilization", "cpuchat probe")),
        ("epyc-9354", {}, BIG, ("problem", "does not fit", "big.gguf is 400 GB; 309 GB of 412 GB", "smaller model")),
        ("container", {}, BIG, ("problem", "does not fit", "cgroup memory limit: 68.7 GB", "Raise the limit")),
    ],
)  # fmt: skip
def test_what_is_wrong(
    tmp_path: Path, name: str, files: dict[str, str], settings: dict[str, Any], wanted: tuple[str, str, str, str]
) -> None:
    level, title, evidence, fix = wanted
    finding = found(facts_of(write(make_tree(tmp_path, name), files), **settings), title)
    assert (finding.level, evidence in finding.evidence) == (level, True), finding
    assert fix in finding.fix and bool(fix) == bool(finding.fix)


def test_a_model_of_ones_own_is_no_other_program(tmp_path: Path) -> None:
    files = {
        "proc/loadavg": "40.1 1 1 2/3 4",
        "proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable: 90000 kB\nSwapTotal: 8388608 kB\nSwapFree: 0 kB",
    }
    facts = facts_of(write(make_tree(tmp_path, "epyc-9354"), files))
    alone, beside = ({one.title for one in examine(facts, beside=beside)} for beside in (False, True))
    assert alone - beside == {"Other programs use the cores", "Little memory is available"}
    assert "Swap is in use" in beside and beside < alone


def test_a_policy_is_tried_in_a_thread_of_its_own() -> None:
    assert refused_policy("local") == ""
    assert refused_policy("bind:1000") != ""


@pytest.mark.parametrize(
    ("engine", "level", "title", "evidence", "fix"),
    [
        ({"AVX2"}, "problem", "built without AVX2", "the CPU has AVX2; the engine has AVX, F16C", "make setup"),
        ({"AVX512", "AVX512_VNNI"}, "warning", "without AVX512, AVX512_VNNI", "has AVX512, AVX512_VNNI", "make setup"),
        ({"AVX512_BF16"}, "advice", "without AVX512_BF16", "AVX512_BF16", "make setup"),
        (("haswell", "AVX2"), "ok", "CPU module haswell of the engine's wheel", "AVX2", ""),
        (("sandybridge", "AVX"), "advice", "CPU module sandybridge", "also runs zen4, haswell", "cpu_module to auto"),
        (CpuchatError("libllama.so is gone."), "problem", "does not start", "libllama.so is gone.", "make setup"),
        (CpuchatError("No room.", "Make room."), "problem", "does not start", "No room.", "Make room."),
    ],
)
def test_an_engine_that_does_not_suit(
    root: Path, engine: object, level: str, title: str, evidence: str, fix: str
) -> None:
    if isinstance(engine, CpuchatError):
        facts = gather_facts(engine_error=engine, kernel=Simulated().calls, root=root)
    elif isinstance(engine, tuple):
        module, feature = engine
        of_wheel = EngineInfo(version="1", features=(feature,), module=module, modules=("zen4", "haswell"))
        facts = facts_of(root, of_wheel)
    else:
        facts = facts_of(
            root, EngineInfo(version="1", features=tuple(one for one in ENGINE.features if one not in engine))
        )
    finding = found(facts, title)
    assert finding.level == level
    assert evidence in finding.evidence and fix in finding.fix


def test_a_counter_that_would_open_with_more_rights(root: Path) -> None:
    write(root, {"proc/sys/kernel/perf_event_paranoid": "4"})
    kernel = Simulated(refuse=lambda _: refused(errno.EACCES)).calls
    facts = gather_facts(engine=ENGINE, kernel=kernel, refused=lambda words: "", root=root)
    why = "the kernel restricts it to root (perf_event_paranoid is 4)"
    assert facts.counter.why == f"{why}; `sudo sysctl kernel.perf_event_paranoid=0`, which `=4` takes back"


def test_a_bandwidth_that_is_too_low_or_too_high_for_the_cores_that_read(root: Path) -> None:
    read_rate(root, 230.4)
    finding = found(facts_of(root), "far below the theoretical peak")
    assert finding.level == "advice" and "`sudo dmidecode -t memory`" in finding.fix
    assert finding.evidence.startswith("230 of 461 GB/s (50 %, measured, 32 cores)")
    read_rate(root, 500)
    assert "(109 %" in found(facts_of(root), "exceeds the theoretical peak").evidence
    read_rate(root, 50.0, range(4))
    assert found(facts_of(root, cores="l3:0"), "read bandwidth").level == "ok"
    write(root, {"proc/self/status": status((*range(8), *range(32, 40)))})
    read_rate(root, 99.0, range(8))
    assert found(facts_of(root), "read bandwidth").level == "ok"


@pytest.mark.parametrize(
    ("link", "level", "words"),
    [
        (50.0, "ok", "the 4 fabric links of its L3 groups carry 200 GB/s at most"),
        (95.0, "advice", "192 of 461 GB/s (42 %, measured, 32 cores)"),
    ],
)
def test_few_links_are_no_fault_of_the_memory(tmp_path: Path, link: float, level: str, words: str) -> None:
    root = make_tree(tmp_path, "epyc-9334")
    read_rate(root, 192.0)
    read_rate(root, link, range(8))
    facts = facts_of(root)
    [finding] = [one for one in examine(facts) if one.evidence.startswith("192 of")]
    assert finding.level == level
    assert words in finding.evidence


def test_little_memory_and_swap_in_use(root: Path) -> None:
    swap = "SwapTotal: 8388608 kB\nSwapFree: 6291456 kB"
    write(root, {"proc/meminfo": f"MemTotal: 402653184 kB\nMemAvailable: 4000000 kB\n{swap}"})
    finding = found(facts_of(root), "Little memory")
    assert (finding.level, finding.evidence) == ("warning", "4.10 GB of 412 GB available")
    finding = found(facts_of(root), "Swap is in use")
    assert finding.level == "advice" and finding.evidence.startswith("2.15 GB of 8.59 GB swap in use")
    # A tenth of a large machine is still a lot.
    write(root, {"proc/meminfo": "MemTotal: 402653184 kB\nMemAvailable: 20000000 kB"})
    assert not [finding for finding in examine(facts_of(root)) if "Little memory" in finding.title]


@pytest.mark.parametrize("name", ["hybrid-desktop", "vm-without-caches", "offline", "garbage"])
def test_every_machine_can_be_examined_and_the_worst_comes_first(tmp_path: Path, name: str) -> None:
    findings = examine(facts_of(make_tree(tmp_path, name)))
    levels = [ORDER.index(finding.level) for finding in findings]
    assert levels == sorted(levels)
    for finding in findings:
        assert finding.evidence
        assert bool(finding.fix) == (finding.level != "ok")
