"""Tests the findings, on simulated machines that are read like a real one: their level, their figure, what to do."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cpuchat.base.errors import CpuchatError
from cpuchat.hardware.diagnostics import ORDER, Finding, WantedSetup, examine, gather_facts, refused_policy
from cpuchat.protocol.model_info import EngineInfo
from tests.hardware.counters.simulated import Simulated, refused
from tests.hardware.diagnostics.servers import ENGINE, facts_of, found
from tests.hardware.trees import NAMES, make_tree, write

pytestmark = pytest.mark.slow

CPUFREQ = "sys/devices/system/cpu/cpu{}/cpufreq"
THP = "sys/kernel/mm/transparent_hugepage/enabled"


def test_a_machine_with_nothing_wrong(root: Path) -> None:
    findings = examine(facts_of(root))
    assert [finding for finding in findings if finding.level != "ok"] == []
    assert {finding.title: finding.evidence for finding in findings} == {
        "engine built for this CPU": "AVX, AVX2, F16C, FMA, AVX512, AVX512_VNNI, AVX512_BF16, LLAMAFILE",
        "memory counter": "umc available",
        "one thread per core": "32 threads on 32 cores",
        "other load": "load average 0.5 over the last minute, 32 cores",
        "governor": "performance on 64 CPUs",
        "boost": "on",
        "read bandwidth": "378.2 of 460.8 GB/s (82 %, measured, 32 cores); "
        "assumed: 12 channels × 4800 MT/s, the maximum of EPYC 9354",
        "NPS1": "1 socket as 1 NUMA node",
        "huge pages": "madvise",
        "memory": "309 GB of 412 GB available",
    }


def test_smt_siblings(root: Path) -> None:
    finding = found(facts_of(root, cores="0-3,32-33"), "SMT siblings")
    assert finding.level == "warning"
    assert finding.evidence == "4 of 6 threads share a core with another (CPUs 0-3,32-33)"
    assert "engine.cores auto" in finding.fix


def test_a_quota_below_the_cores(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "container")
    finding = found(facts_of(root), "CPU quota")
    assert finding.level == "warning"
    assert finding.evidence == "cgroup CPU quota: 6.5, 8 cores available"
    assert "--cpuset-cpus" in finding.fix


def test_a_quota_below_the_threads_that_are_set(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "container")
    finding = found(facts_of(root, threads=8), "quota is below the thread count")
    assert finding.level == "problem"
    assert finding.evidence == "8 threads configured, cgroup CPU quota: 6.5"
    assert finding.fix == "Set engine.threads to 0."
    assert found(facts_of(root, threads=8), "configured cores").level == "problem"


def test_a_quota_that_is_enough(root: Path) -> None:
    write(root, {"sys/fs/cgroup/cpu.max": "3200000 100000"})
    assert found(facts_of(root), "CPU quota") == Finding("ok", "CPU quota", "32 CPUs for 32 cores")


@pytest.mark.parametrize(("settings", "number"), [({"cores": "l3:99"}, "99"), ({"threads": 65}, "65")])
def test_cores_that_are_not_there(root: Path, settings: dict[str, str | int], number: str) -> None:
    finding = found(facts_of(root, ENGINE, **settings), "configured cores cannot be used")
    assert finding.level == "problem"
    assert number in finding.evidence


def test_a_policy_that_is_not_possible(root: Path) -> None:
    finding = found(facts_of(root, memory="bind:7"), "configured memory policy")
    assert finding.level == "problem"
    assert "bind:7" in finding.evidence


def test_a_policy_that_the_kernel_refuses(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    asked: list[str] = []

    def refused(words: str) -> str:
        asked.append(words)
        return "Operation not permitted"

    facts = gather_facts(WantedSetup(), kernel=Simulated().calls, refused=refused, root=root)
    finding = found(facts, "memory policy is not in effect")
    assert asked == ["interleave:0-1"]
    assert finding.level == "warning"
    assert finding.evidence == "interleave:0-1: Operation not permitted"
    assert "SYS_NICE" in finding.fix


def test_a_policy_is_tried_in_a_process_of_its_own() -> None:
    assert refused_policy("local") == ""
    assert refused_policy("bind:1000") != ""


@pytest.mark.parametrize(
    ("without", "level", "named"),
    [
        ({"AVX2"}, "problem", "AVX2"),
        ({"AVX512", "AVX512_VNNI"}, "warning", "AVX512, AVX512_VNNI"),
        ({"AVX512_BF16"}, "advice", "AVX512_BF16"),
    ],
)
def test_an_engine_without_what_the_cpu_has(root: Path, without: set[str], level: str, named: str) -> None:
    features = tuple(name for name in ENGINE.features if name not in without)
    finding = found(facts_of(root, EngineInfo(version="1", features=features)), "built without")
    assert finding.level == level
    assert finding.title == f"The engine was built without {named}"
    assert finding.evidence == f"the CPU has {named}; the engine has {', '.join(features)}"
    assert "make setup" in finding.fix


def test_the_cpu_module_of_a_wheel_is_named_and_lacks_what_it_lacks_on_purpose(root: Path) -> None:
    features, modules = ("AVX", "AVX2", "F16C", "FMA"), ("zen4", "skylakex", "haswell")
    engine = EngineInfo(version="1", features=features, module="haswell", modules=modules)
    finding = found(facts_of(root, engine), "CPU module haswell")
    assert finding == Finding("ok", "CPU module haswell of the engine's wheel", "AVX, AVX2, F16C, FMA")
    assert not [one for one in examine(facts_of(root, engine)) if "built" in one.title]
    old = EngineInfo(version="1", features=("AVX",), module="sandybridge", modules=modules)
    finding = found(facts_of(root, old), "CPU module sandybridge")
    assert (finding.level, finding.fix) == ("advice", "Set engine.cpu_module to auto.")
    assert finding.evidence == "it has AVX; this CPU also runs zen4, skylakex, haswell"


def test_an_engine_without_amx(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "xeon-6430")
    text = (root / "proc/cpuinfo").read_text()
    write(root, {"proc/cpuinfo": text.replace("avx512f", "avx512f amx_int8 amx_tile")})
    engine = EngineInfo(version="1", features=("AVX2", "AVX512"))
    finding = found(facts_of(root, engine), "AMX_INT8")
    assert finding.level == "warning"


def test_an_engine_for_another_cpu(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    finding = found(facts_of(root), "built for another CPU")
    assert finding.level == "problem"
    assert "AVX512, AVX512_VNNI, AVX512_BF16, which this CPU lacks" in finding.evidence


def test_an_engine_that_does_not_start(root: Path) -> None:
    error = CpuchatError("libllama.so is gone.")
    facts = gather_facts(WantedSetup(), engine_error=error, kernel=Simulated().calls, root=root)
    finding = found(facts, "does not start")
    assert (finding.level, finding.evidence) == ("problem", "libllama.so is gone.")
    assert "make setup" in finding.fix


def test_what_the_error_of_the_engine_advises_is_the_fix(root: Path) -> None:
    error = CpuchatError("No room.", "Make room.")
    facts = gather_facts(WantedSetup(), engine_error=error, kernel=Simulated().calls, root=root)
    assert found(facts, "does not start").fix == "Make room."


def test_a_governor_that_saves_power(root: Path) -> None:
    write(root, {f"{CPUFREQ.format(cpu)}/scaling_governor": "powersave" for cpu in range(48)})
    for driver, level, title in (
        ("acpi-cpufreq", "warning", "lowest frequency"),
        ("amd-pstate-epp", "advice", "saves power"),
        ("intel_pstate", "advice", "saves power"),
    ):
        write(root, {f"{CPUFREQ.format(0)}/scaling_driver": driver})
        finding = found(facts_of(root), title)
        assert finding.level == level
        assert finding.evidence == f"powersave on 48 of 64 CPUs (driver {driver})"
        assert "under `governor`" in finding.fix


@pytest.mark.parametrize("file", [("cpufreq/boost", "0"), ("intel_pstate/no_turbo", "1")])
def test_boost_is_off(root: Path, file: tuple[str, str]) -> None:
    (root / "sys/devices/system/cpu/cpufreq/boost").unlink()
    write(root, {f"sys/devices/system/cpu/{file[0]}": file[1]})
    finding = found(facts_of(root), "Boost is off")
    assert finding.level == "advice"
    assert "under `boost`" in finding.fix


@pytest.mark.parametrize(("load", "level"), [("40.1", "warning"), ("20.0", "advice"), ("16.0", "ok")])
def test_other_load(root: Path, load: str, level: str) -> None:
    write(root, {"proc/loadavg": f"{load} 1.0 1.0 2/1234 5678"})
    [finding] = [finding for finding in examine(facts_of(root)) if finding.evidence.startswith("load average")]
    assert finding.level == level
    assert load in finding.evidence


def test_load_is_that_of_the_machine_and_not_of_the_part_that_a_container_has(tmp_path: Path) -> None:
    root = write(make_tree(tmp_path, "container"), {"proc/loadavg": "9.5 1.0 1.0 2/1234 5678"})
    assert found(facts_of(root), "other load").evidence.endswith(", 32 cores")


def test_isolated_cores(root: Path) -> None:
    write(root, {"sys/devices/system/cpu/isolated": "28-31"})
    finding = found(facts_of(root), "isolated")
    assert finding.level == "advice"
    assert finding.evidence == "CPUs 28-31 of 0-31 are isolated (isolcpus=)"
    assert "engine.cores 0-27" in finding.fix
    assert not [f for f in examine(facts_of(root, cores="28-31")) if "reserved" in f.title]


def test_a_virtual_machine(tmp_path: Path) -> None:
    finding = found(facts_of(make_tree(tmp_path, "vm")), "topology is unverified")
    assert finding.level == "advice"
    assert "hypervisor flag in /proc/cpuinfo" in finding.evidence
    assert "2 L3 groups × 4 cores" in finding.evidence


def test_a_counter_that_would_open_with_more_rights(root: Path) -> None:
    write(root, {"proc/sys/kernel/perf_event_paranoid": "4"})
    kernel = Simulated(refuse=lambda _: refused(errno.EACCES)).calls
    facts = gather_facts(WantedSetup(), engine=ENGINE, kernel=kernel, refused=lambda words: "", root=root)
    finding = found(facts, "No counter of memory traffic is available")
    assert finding.level == "advice"
    assert finding.evidence == "the kernel restricts it to root (perf_event_paranoid is 4)"
    assert finding.fix == "`sudo sysctl kernel.perf_event_paranoid=0`, which `=4` takes back"


def test_a_container_cannot_load_drivers(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    (root / ".dockerenv").touch()
    finding = found(facts_of(root), "No counter of memory traffic is available")
    assert finding.fix == "On the host of this container: `sudo modprobe amd_uncore`"


def test_what_cannot_be_changed_from_here_is_not_said_to_be(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "container")
    write(root, {THP: "always madvise [never]"})
    assert found(facts_of(root), "huge pages").fix == "Not changeable from here: ask the administrator of the machine."
    root = write(
        make_tree(tmp_path, "vm"), {THP: "always madvise [never]", f"{CPUFREQ.format(0)}/scaling_governor": "x"}
    )
    assert "under `huge pages`" in found(facts_of(root), "huge pages").fix
    assert "ask the administrator" in found(facts_of(root), "governor").fix


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_can_be_examined_and_the_worst_comes_first(tmp_path: Path, name: str) -> None:
    findings = examine(facts_of(make_tree(tmp_path, name)))
    levels = [ORDER.index(finding.level) for finding in findings]
    assert levels == sorted(levels)
    for finding in findings:
        assert finding.evidence
        assert bool(finding.fix) == (finding.level != "ok")


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    facts = facts_of(tmp_path, None)
    assert [finding.level for finding in examine(facts) if finding.level in ("problem", "warning")] == []
    assert facts.load is None
    assert facts.boost is None
