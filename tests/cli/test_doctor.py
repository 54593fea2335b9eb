"""Tests `cpuchat doctor`: on this machine as a user runs it, and on simulated ones."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cpuchat.cli import machine, version
from cpuchat.cli import main as program
from cpuchat.config.settings import ModelSection, Settings
from cpuchat.hardware.bandwidth import read_bandwidth
from cpuchat.hardware.bandwidth.read_bandwidth import ReadBandwidth, Survey, known_peak, remember
from cpuchat.hardware.diagnostics import DiagnosticFacts, WantedSetup, examine, gather_facts
from cpuchat.hardware.topology import Topology
from cpuchat.present.machine import page, page_json
from cpuchat.protocol.model_info import EngineInfo
from tests.cli.program import run
from tests.hardware.counters.simulated import Simulated
from tests.hardware.trees import make_tree, write

ENGINE = EngineInfo(version="0.3.36", llama_commit="0c1e570", features=("AVX", "SSE3"))


def facts_of(root: Path, **settings: str | int) -> DiagnosticFacts:
    wanted = WantedSetup(**settings)  # type: ignore[arg-type]
    return gather_facts(wanted, engine=ENGINE, kernel=Simulated().calls, refused=lambda words: "", root=root)


def everything_wrong(tmp_path: Path) -> DiagnosticFacts:
    """Return a machine of two sockets with as many problems as possible."""
    root = make_tree(tmp_path, "2x-epyc-7543")
    write(root, {
        "proc/loadavg": "180.25 1 1 2/3 4",
        "proc/meminfo": "MemTotal: 536870912 kB\nMemAvailable: 9000000 kB\nSwapTotal: 8388608 kB\nSwapFree: 0 kB",
        "proc/sys/kernel/numa_balancing": "1",
        "proc/sys/kernel/perf_event_paranoid": "4",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "sys/devices/system/cpu/cpufreq/boost": "0",
        "sys/fs/cgroup/cpu.max": "800000 100000",
        **{f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor": "powersave" for n in range(64)},
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq",
    })  # fmt: skip
    return facts_of(root, cores="0-7,64-71", model="a-large-model.gguf", model_bytes=80_000_000_000)


def wrapped(lines: list[str]) -> list[str]:
    """Return all lines but those for a shell, which stay whole."""
    return [line for line in lines if not ("sudo" in line and line.startswith(("  → ", "  ← ")))]


@pytest.mark.parametrize(
    "name", ["epyc-9354", "2x-epyc-7543", "hybrid-desktop", "container", "vm-without-caches", "garbage"]
)
def test_every_machine_fits_on_a_page(tmp_path: Path, name: str) -> None:
    facts = facts_of(make_tree(tmp_path, name))
    lines = page(facts, examine(facts))
    assert len(lines) <= 70
    assert max(map(len, wrapped(lines))) <= 100
    assert lines[0] == facts.topology.name
    for word in ("cores", "memory", "bandwidth", "NUMA", "counters", "engine", "settings"):
        assert any(line.startswith(f"{word} ") for line in lines)


def test_a_page_with_everything_wrong_begins_with_the_worst(tmp_path: Path) -> None:
    facts = everything_wrong(tmp_path)
    findings = examine(facts)
    assert len([finding for finding in findings if finding.level != "ok"]) >= 9
    lines = page(facts, findings)
    assert max(map(len, wrapped(lines))) <= 100
    assert len(lines) <= 58
    levels = [line.partition(":")[0] for line in lines if line.startswith(("problem:", "warning:", "advice:"))]
    assert levels == sorted(levels, key=("problem", "warning", "advice").index)
    text = " ".join(" ".join(lines).split())
    for finding in findings:
        assert finding.title in text
        assert finding.level == "ok" or (finding.evidence in text and finding.fix in text)


def test_each_knob_has_its_state_its_worth_and_whole_lines(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    write(root, {"proc/sys/kernel/numa_balancing": "1", "sys/devices/system/cpu/smt/control": "on"})
    lines = page(facts := facts_of(root), examine(facts))
    text = " ".join(" ".join(lines).split())
    assert "NUMA balancing: on. Fewer page faults and migrations while several nodes are read" in text
    at = lines.index("  → sudo sysctl kernel.numa_balancing=0")
    assert lines[at + 1] == "  ← sudo sysctl kernel.numa_balancing=1"
    assert "  → echo off | sudo tee /sys/devices/system/cpu/smt/control" in lines
    assert "prefetchers: not changeable, the firmware setup has them on this CPU" in text
    found = page_json(facts, examine(facts))["knobs"]
    assert [one["name"] for one in found][:3] == ["governor", "boost", "SMT"]
    assert found[2]["back"] == "echo on | sudo tee /sys/devices/system/cpu/smt/control"


def test_what_is_not_known_says_why_and_how(tmp_path: Path) -> None:
    lines = page(facts := facts_of(make_tree(tmp_path, "vm")), examine(facts))
    text = " ".join(" ".join(lines).split())
    assert "theoretical peak: n/a: memory modules are not visible in a virtual machine" in text
    assert "n/a: not measured yet; `cpuchat probe` measures it" in text
    assert "memory traffic: n/a: virtual machines expose no such counters" in text


def test_the_whole_survey_is_on_the_page(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    facts = facts_of(root)

    def reads(gigabytes: float, n: int) -> ReadBandwidth:
        return ReadBandwidth(tuple(range(n)), gigabytes * 1e9, (gigabytes * 1e9,) * 3)

    everything = Survey(
        one_core=reads(25.3, 1), l3_group=reads(49.9, 4), all_cores=reads(367.0, 32),
    )  # fmt: skip
    remember(everything.all_cores, "local", root=root)
    facts = replace(facts, survey=everything, peak=known_peak(range(32), "local", root=root))
    text = " ".join(" ".join(page(facts, [])).split())
    assert (
        "bandwidth 367 GB/s read (measured, 32 cores), 80 % of the theoretical peak · 1 core 25.3 · 1 L3 group 49.9 "
    ) in text


def test_this_machine_as_a_user_asks() -> None:
    done = run("doctor")
    assert done.returncode in (0, 1), done.stderr
    assert "llama.cpp" in done.stdout
    found = json.loads(run("doctor", "--json").stdout)
    assert set(found["cpus"]) <= os.sched_getaffinity(0)
    assert "LLAMAFILE" in found["engine"]["features"]
    assert found["memory_available"] > 0
    assert {finding["level"] for finding in found["findings"]} <= {"problem", "warning", "advice", "ok"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the engine out: the test above starts it, and each start is slow."""

    async def engine(_: str = "") -> EngineInfo:
        return EngineInfo(version="0.3.36", features=("AVX", "AVX2", "FMA", "F16C", "AVX512", "AVX512_VNNI"))

    monkeypatch.setattr(version, "engine_info", engine)


def surveyed(topology: Topology, *, cpus: tuple[int, ...], memory: str, root: Path) -> Survey:
    measured = ReadBandwidth(cpus, 49.9e9, (49.9e9,))
    return Survey(one_core=measured, all_cores=measured)


@pytest.mark.usefixtures("quick")
def test_the_exit_code_is_that_of_the_worst_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    monkeypatch.setattr(machine, "ROOT", root)
    assert program.main(["doctor"]) == 0  # advice only: it was not measured
    assert "advice: The read bandwidth has not been measured" in capsys.readouterr().out
    write(root, {"proc/loadavg": "100 1 1 1/1 1"})
    assert program.main(["doctor"]) == 1
    assert "warning: Other programs use the cores" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_probe_measures_the_cores_of_the_settings_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    monkeypatch.setattr(machine, "ROOT", root)
    config = Path(os.environ["CPUCHAT_CONFIG_DIR"]) / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text('[engine]\ncores = "l3:0"\n')

    monkeypatch.setattr(read_bandwidth, "survey", surveyed)
    assert program.main(["doctor", "--probe", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["peak_read"], found["cpus"]) == (49.9e9, [0, 1, 2, 3])


@pytest.mark.usefixtures("quick")
def test_settings_that_are_not_possible_are_a_finding_and_not_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "ROOT", make_tree(tmp_path, "epyc-9354"))
    config = Path(os.environ["CPUCHAT_CONFIG_DIR"]) / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text('[engine]\ncores = "l3:77"\nmemory = "bind:5"\n')
    assert program.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "problem: The configured cores cannot be used" in out
    assert "problem: The configured memory policy cannot be used" in out


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("arguments", [(), ("--probe",)])
def test_too_many_threads_in_the_settings_are_a_finding_and_not_a_failure(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "ROOT", make_tree(tmp_path, "epyc-9354"))
    monkeypatch.setattr(read_bandwidth, "survey", surveyed)
    config = Path(os.environ["CPUCHAT_CONFIG_DIR"]) / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("[engine]\nthreads = 500\n")
    assert program.main(["doctor", *arguments]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "problem: The configured cores cannot be used" in out
    assert "500 threads" in out


@pytest.mark.usefixtures("quick")
def test_what_was_measured_is_shown_where_it_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "ROOT", make_tree(tmp_path, "epyc-9354"))
    monkeypatch.setattr(read_bandwidth, "survey", surveyed)
    (tmp_path / "file").touch()
    monkeypatch.setenv("CPUCHAT_CACHE_DIR", str(tmp_path / "file/cache"))
    program.main(["doctor", "--probe"])
    assert "bandwidth  49.9 GB/s read (measured, 32 cores)" in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_the_page_is_as_wide_as_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "ROOT", make_tree(tmp_path, "2x-epyc-7543"))
    monkeypatch.setenv("COLUMNS", "64")
    program.main(["doctor"])
    assert 55 < max(map(len, wrapped(capsys.readouterr().out.splitlines()))) <= 64


@pytest.mark.usefixtures("quick")
def test_the_model_of_last_time_is_weighed(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    write(root, {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 100 kB"})
    monkeypatch.setattr(machine, "ROOT", root)
    config = Path(os.environ["CPUCHAT_CONFIG_DIR"]) / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(f"[model]\nlast = {json.dumps(str(tiny_model))}\n")
    assert program.main(["doctor"]) == 1
    assert "problem: The model does not fit into memory — tiny-F32.gguf is" in capsys.readouterr().out


def test_a_model_in_parts_is_as_large_as_all_of_them(tmp_path: Path) -> None:
    parts = [tmp_path / f"x-0000{n}-of-00002.gguf" for n in (1, 2)]
    for part, size in zip(parts, (100, 200), strict=True):
        part.write_bytes(bytes(size))
    last = Settings(model=ModelSection(last=str(parts[0])))
    assert machine._wanted_setup(Topology(), last).model_bytes == 300


@pytest.mark.usefixtures("quick")
def test_a_damaged_settings_file_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(os.environ["CPUCHAT_CONFIG_DIR"]) / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("[engine]\nthreads = -3\n")
    assert program.main(["doctor", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "settings"
