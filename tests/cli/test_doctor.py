"""Tests `cpuchat doctor`: on this machine as a user runs it, and on simulated ones."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuchat.cli import machine, version
from cpuchat.cli import main as program
from cpuchat.hardware.diagnostics import DiagnosticFacts, examine, gather_facts
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.present.machine import page, page_json, title
from cpuchat.protocol.model_info import EngineInfo
from cpuchat.telemetry.machine import Peak, Peaks
from tests.cli.program import run
from tests.hardware.counters.simulated import Simulated, energy, refused, umc
from tests.hardware.trees import make_tree, write

ENGINE = EngineInfo(version="0.3.36", llama_commit="0c1e570", features=("AVX", "SSE3"))


def facts_of(root: Path, **settings: Any) -> DiagnosticFacts:
    model = {name: settings.pop(name) for name in ("model", "model_bytes") if name in settings}
    return gather_facts(
        PlacementSpec(**settings), **model, engine=ENGINE, kernel=Simulated().calls, refused=lambda words: "", root=root
    )


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


def test_a_page_with_everything_wrong_begins_with_the_worst(tmp_path: Path) -> None:
    facts = everything_wrong(tmp_path)
    findings = examine(facts)
    assert len([finding for finding in findings if finding.level != "ok"]) >= 9
    lines = page(facts, findings)
    assert max(map(len, wrapped(lines))) <= 100
    assert len(lines) <= 58 and lines[0] == title(facts)
    for word in ("cores", "memory", "bandwidth", "NUMA", "counters", "engine", "settings"):
        assert any(line.startswith(f"{word} ") for line in lines)
    levels = [line.partition(":")[0] for line in lines if line.startswith(("problem:", "warning:", "advice:"))]
    assert levels == sorted(levels, key=("problem", "warning", "advice").index)
    text = " ".join(" ".join(lines).split())
    for finding in findings:
        assert finding.title in text
        assert finding.level == "ok" or (finding.evidence in text and finding.fix in text)


def test_in_a_container_commands_of_root_are_for_its_host(tmp_path: Path) -> None:
    write(root := make_tree(tmp_path, "epyc-9354"), {"proc/sys/kernel/perf_event_paranoid": "4", ".dockerenv": ""})
    umc(root, 0, "0")
    energy(root, "0")
    kernel = Simulated(refuse=lambda _: refused(errno.EACCES)).calls
    facts = gather_facts(engine=ENGINE, kernel=kernel, refused=lambda words: "", root=root)
    text = " ".join(" ".join(page(facts, [])).split())
    restricted = "n/a: the kernel restricts it to root (perf_event_paranoid is 4); on the host of this container"
    assert f"and power: {restricted}" in text


def test_each_knob_has_its_state_its_worth_and_whole_lines(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    write(root, {"proc/sys/kernel/numa_balancing": "1"})
    lines = page(facts := facts_of(root), examine(facts))
    text = " ".join(" ".join(lines).split())
    assert "NUMA balancing: on. Fewer page faults and migrations while several nodes are read" in text
    at = lines.index("  → sudo sysctl kernel.numa_balancing=0")
    assert lines[at + 1] == "  ← sudo sysctl kernel.numa_balancing=1"
    found = page_json(facts, examine(facts))["knobs"]
    assert [one["name"] for one in found] == ["governor", "boost", "huge pages", "NUMA balancing"]
    assert found[3]["back"] == "sudo sysctl kernel.numa_balancing=1"


@pytest.mark.parametrize("is_estimated", [False, True])
def test_an_estimate_is_no_measured_bandwidth(tmp_path: Path, is_estimated: bool) -> None:
    peaks = Peaks(all_cores=Peak(2e11, (0, 1), estimated=is_estimated))
    found = page_json(replace(facts_of(make_tree(tmp_path, "epyc-9354")), peaks=peaks), [])
    assert (found["peak_read"], found["peak_estimated"]) == ((None, 2e11) if is_estimated else (2e11, None))


def test_this_machine_as_a_user_asks() -> None:
    done = run("doctor")
    assert done.returncode in (0, 1) and "llama.cpp" in done.stdout, done.stderr
    found = json.loads(run("doctor", "--json").stdout)
    assert set(found["cpus"]) <= os.sched_getaffinity(0)
    assert "LLAMAFILE" in found["engine"]["features"] and found["memory_available"] > 0
    assert {finding["level"] for finding in found["findings"]} <= {"problem", "warning", "advice", "ok"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the engine out: the test above starts it, and each start is slow."""

    async def engine(_: str = "") -> EngineInfo:
        return EngineInfo(version="0.3.36", features=("AVX", "AVX2", "FMA", "F16C", "AVX512", "AVX512_VNNI"))

    monkeypatch.setattr(version, "engine_info", engine)


@pytest.mark.usefixtures("quick")
def test_the_exit_code_tells_a_problem_and_wrong_settings_are_one(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    monkeypatch.setattr(machine, "ROOT", root)
    config = Path(os.environ["CPUCHAT_CONFIG_DIR"]) / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)

    def told(settings: str = "") -> tuple[int, str]:
        config.write_text(settings)
        code = program.main(["doctor"])
        return code, " ".join(capsys.readouterr().out.split())

    code, out = told()  # advice only: it was not measured
    assert code == 0 and "advice: The read bandwidth has not been measured" in out
    write(root, {"proc/loadavg": "100 1 1 1/1 1"})
    code, out = told()
    assert code == 0 and "warning: Other programs use the cores" in out
    code, out = told('[engine]\ncores = "l3:77"\nmemory_policy = "bind:5"\n')
    assert code == 1 and "problem: The configured cores cannot be used" in out
    assert "problem: The configured memory policy cannot be used" in out
    assert "500 threads" in told("[engine]\nthreads = 500\n")[1]
    write(root, {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 100 kB"})
    code, out = told(f"[model]\nlast = {json.dumps(str(tiny_model))}\n")  # the model of last time is weighed
    assert code == 1 and "problem: The model does not fit into memory — tiny-F32.gguf is" in out
