"""Tests `cpuchat system` on a simulated machine, from the plan to the verdict; the model that is measured is a
real one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cpuchat.cli import main as program
from cpuchat.cli import system
from cpuchat.cli.terminal import Terminal
from cpuchat.config.settings import Settings
from cpuchat.hardware.tuning import plan as tuning
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.telemetry.answer import DecodeRate
from cpuchat.tune import trial
from tests.hardware.trees import cache_files, cpu_files, cpuinfo, node_files, system_files
from tests.hardware.tuning import machine

Answer = tuple[int, str, str]
Cpuchat = Callable[..., Answer]
CPUS = tuple(range(8))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server of the tuning tests, with the rest of its topology."""
    files = system_files(64 << 30, CPUS, False)
    files["proc/cpuinfo"] = cpuinfo("AMD EPYC 9354P 32-Core Processor", "AuthenticAMD", 25, 17, "avx2 cat_l3", CPUS)
    for cpu in CPUS:
        files |= cpu_files(cpu, 0, cpu, (cpu,), 3_800_000)
        sharing = tuple(range(cpu // 4 * 4, cpu // 4 * 4 + 4))
        files |= cache_files(cpu, 3, 3, "Unified", 32768, sharing, id=cpu // 4, ways=16)
    files |= node_files(0, CPUS, (10,), 64 << 30)
    root = machine.server(machine.write(tmp_path / "machine", files))
    monkeypatch.setattr(system, "ROOT", root)
    return root


@pytest.fixture
def cpuchat(root: Path, capsys: pytest.CaptureFixture[str]) -> Cpuchat:
    def call(*arguments: str) -> Answer:
        status = program.main(["system", *arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return call


def test_the_state_is_a_table_with_what_is_not_offered(cpuchat: Cpuchat) -> None:
    status, out, _ = cpuchat("state")
    assert status == 0
    lines = {line.split("  ")[0]: line for line in out.splitlines() if line and not line.startswith(" ")}
    assert lines["governor"].split() == ["governor", "powersave", "low", "risk,", "small", "gain"]
    assert lines["l3"].endswith("unavailable")
    assert "  l3: the kernel has no resctrl support." in out
    assert "  numa-balancing: there is only one NUMA node." in out
    rows = {row["name"]: row for row in json.loads(cpuchat("state", "--json")[1])}
    assert rows["thp"]["value"] == "madvise"
    assert rows["l3"]["refusal"]["why"] == "the kernel has no resctrl support"


def test_a_plan_is_printed_with_its_script_and_the_way_back(cpuchat: Cpuchat, root: Path) -> None:
    before = machine.snapshot(root)
    status, out, _ = cpuchat("plan")
    assert status == 0
    [saved] = tuning.saved_plans()
    assert "governor  powersave → performance" in out
    assert "8 files" in out
    assert all(f"    {line}".rstrip() in out for line in saved.apply.read_text().splitlines())
    assert f"sudo sh {saved.apply}" in out
    assert f"sudo sh {saved.revert}" in out
    assert "boost: already set" in out
    assert machine.snapshot(root) == before


def test_one_knob_as_json(cpuchat: Cpuchat) -> None:
    made = json.loads(cpuchat("plan", "--knob", "thp", "--json")[1])
    assert made["changes"] == [
        {"knob": "thp", "path": "/sys/kernel/mm/transparent_hugepage/enabled", "old": "madvise", "new": "always"}
    ]
    assert Path(made["apply"]).parent.name == made["name"]
    assert Path(made["revert"]).exists()


def test_nothing_to_change_writes_nothing(cpuchat: Cpuchat) -> None:
    status, out, _ = cpuchat("plan", "--knob", "boost")
    assert (status, out.splitlines()[0]) == (0, "Nothing to change.")
    status, out, _ = cpuchat("plan", "--knob", "numa-balancing")
    assert (status, out.splitlines()[0]) == (0, "Nothing can be changed on this machine.")
    assert not tuning.plans_dir().exists()


def test_a_container_says_so_once(cpuchat: Cpuchat, root: Path) -> None:
    (root / ".dockerenv").touch()
    status, out, _ = cpuchat("plan")
    assert status == 0
    assert out.count("this is a container (/.dockerenv)") == 1
    assert "epp, governor, boost, thp, numa-balancing: this is" in out


def test_wrong_names_are_usage_errors(cpuchat: Cpuchat) -> None:
    status, _, err = cpuchat("plan", "--knob", "speed")
    assert status == 2
    assert "Unknown knob: speed." in err
    for command in (("revert", "x"), ("measure", "--plan", "x"), ("measure", "--label", "before")):
        status, _, err = cpuchat(*command)
        assert status == 2
        assert "No tuning plan found" in err


def test_draft_cores_that_are_not_there_are_left_out(cpuchat: Cpuchat, root: Path) -> None:
    machine.resctrl(root)
    config = Path(os.environ["CPUCHAT_CONFIG_DIR"]) / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text('[speculation]\ndraft_cores = "l3:9"\n')
    assert cpuchat("plan", "--knob", "governor")[0] == 0
    status, out, _ = cpuchat("plan", "--knob", "l3")
    assert (status, "no L3 group is shared by both models" in out) == (0, True)


def test_lines_are_as_wide_as_the_terminal(cpuchat: Cpuchat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, cpuchat("state")[1].splitlines())) <= 80
    out = cpuchat("plan")[1]
    assert max(map(len, out.partition("reverts everything")[0].splitlines()[:-1])) <= 80


def test_without_a_command_it_shows_its_help(cpuchat: Cpuchat) -> None:
    status, out, err = cpuchat()
    assert (status, out) == (2, "")
    assert err.startswith("Usage: cpuchat system")
    assert "Workflow:" in err


def test_the_cache_is_divided_where_the_draft_has_cores_beside_the_target(cpuchat: Cpuchat, root: Path) -> None:
    machine.resctrl(root)
    assert "the draft model has no cores of its own" in cpuchat("plan", "--knob", "l3")[1]
    config = Path(os.environ["CPUCHAT_CONFIG_DIR"]) / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text('[speculation]\ndraft_cores = "2-3,6-7"\n')
    made = json.loads(cpuchat("plan", "--knob", "l3", "--json")[1])
    assert made["group"] == {"path": "/sys/fs/resctrl/cpuchat", "schemata": "L3:0=f;1=f", "cpus": "0-1,4-5"}
    assert made["notes"] == ["l3: helps drafting only; measured without drafts, it shows just the target's loss"]


class Rates:
    """In place of a worker: a model that decodes at the rates that a test says."""

    def __init__(self) -> None:
        self.rate = 40.0
        self.model = ModelInfo(
            path="/m.gguf", name="Model", architecture="qwen2", quantization="Q8_0", n_params=1, size=1, n_ctx=1,
            n_ctx_train=1, n_vocab=1, n_layer=1, n_threads=2, kv_size=1, fingerprint="f", cpus=(0, 1),
        )  # fmt: skip

    async def __call__(self, path: Path, chosen: Settings, terminal: Terminal) -> tuple[ModelInfo, DecodeRate]:
        rounds = (self.rate - 0.1, self.rate, self.rate + 0.1)
        return self.model, DecodeRate(tok_s=self.rate, spread=0.2, rounds=rounds)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Rates:
    rates = Rates()
    monkeypatch.setattr(system, "decode_rate", rates)
    return rates


def apply_plan(root: Path) -> None:
    assert machine.run(tuning.find_plan().apply, root).returncode == 0


def test_a_divided_cache_is_not_judged_by_the_target_alone(cpuchat: Cpuchat, root: Path, rates: Rates) -> None:
    machine.resctrl(root)
    config = Path(os.environ["CPUCHAT_CONFIG_DIR"]) / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text('[speculation]\ndraft_cores = "2-3,6-7"\n')
    cpuchat("plan", "--knob", "l3")
    cpuchat("measure")
    apply_plan(root)
    _, out, _ = cpuchat("measure")
    assert "in effect: l3" in out
    assert "helps drafting only" in out


def test_what_gains_is_kept(cpuchat: Cpuchat, root: Path, rates: Rates) -> None:
    cpuchat("plan", "--knob", "governor")
    status, out, _ = cpuchat("measure")
    assert (status, out.splitlines()[0]) == (0, "before: Model: 40.0 tok/s (spread 0.20)")
    assert f"Now apply the plan: sudo sh {tuning.find_plan().apply}" in out
    apply_plan(root)
    rates.rate = 44.0
    status, out, _ = cpuchat("measure")
    assert status == 0
    assert "after: Model: 44.0 tok/s" in out
    assert "in effect: epp, governor" in out
    assert "Keep it: 40.0 → 44.0 tok/s, +10.0 %" in out
    assert "revert.sh" not in out
    status, out, _ = cpuchat("list")
    assert "in effect: epp, governor\n  40.0 → 44.0 tok/s: Keep it" in out


def test_what_gains_nothing_is_to_be_reverted(cpuchat: Cpuchat, root: Path, rates: Rates) -> None:
    cpuchat("plan", "--knob", "governor")
    cpuchat("measure")
    apply_plan(root)
    (root / machine.CPUFREQ.format(3) / "scaling_governor").write_text("powersave\n")
    rates.rate = 40.3
    result = json.loads(cpuchat("measure", "--json")[1])
    assert result["effect"] == {"epp": [8, 8], "governor": [7, 8]}
    assert result["verdict"]["keep"] is False
    _, out, _ = cpuchat("measure")
    assert "in effect: epp; in part: governor (7 of 8)" in out
    assert "not significant" in out
    assert f"To revert: sudo sh {tuning.find_plan().revert}" in out


def test_before_is_not_measured_after_and_after_not_before(cpuchat: Cpuchat, root: Path, rates: Rates) -> None:
    cpuchat("plan", "--knob", "governor")
    status, _, err = cpuchat("measure", "--label", "after")
    assert status == 2
    assert "is not in effect" in err
    apply_plan(root)
    status, _, err = cpuchat("measure")
    assert status == 2
    assert "so this would not measure the state before" in err
    assert "revert.sh" in err
    status, out, _ = cpuchat("measure", "--label", "after")
    assert status == 0
    assert "No comparison: before not measured." in out


def test_another_model_is_not_compared(cpuchat: Cpuchat, root: Path, rates: Rates) -> None:
    cpuchat("plan", "--knob", "governor")
    cpuchat("measure")
    apply_plan(root)
    rates.model = ModelInfo(**{**_fields(rates.model), "name": "Other", "fingerprint": "g"})
    assert "No comparison: measured with different models" in cpuchat("measure")[1]
    rates.model = ModelInfo(**{**_fields(rates.model), "fingerprint": "f", "cpus": (0,)})
    assert "No comparison: measured on different CPUs" in cpuchat("measure")[1]


def _fields(model: ModelInfo) -> dict[str, object]:
    return {name: getattr(model, name) for name in model.__struct_fields__}


def test_without_a_plan_it_just_measures_a_real_model(cpuchat: Cpuchat, tiny_model: Path) -> None:
    status, out, err = cpuchat("measure", "--model", str(tiny_model), "--threads", "1", "--json")
    assert status == 0, err
    result = json.loads(out)
    assert result["tok_s"] > 0
    assert len(result["rounds"]) == 3
    assert "verdict" not in result
    assert not tuning.plans_dir().exists()


def test_a_model_that_cannot_be_loaded_is_a_plain_error(cpuchat: Cpuchat, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    status, _, err = cpuchat("measure", "--model", str(damaged))
    assert status == 4
    assert "damaged" in err


def test_the_way_back_is_one_command_on_standard_output(cpuchat: Cpuchat, root: Path) -> None:
    cpuchat("plan", "--knob", "thp")
    saved = tuning.find_plan()
    status, out, err = cpuchat("revert")
    assert (status, out) == (0, f"sudo sh {saved.revert}\n")
    assert "is not in effect" in err
    apply_plan(root)
    assert "is in effect: " in cpuchat("revert")[2]
    assert "thp" in json.loads(cpuchat("list", "--json")[1])[0]["effect"]


def test_an_empty_list_says_what_to_do(cpuchat: Cpuchat) -> None:
    assert cpuchat("list")[1] == "No tuning plans. Create one: cpuchat system plan\n"


def test_a_measurement_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "before.json").write_text('{"label": 7}')
    assert trial.load(tmp_path, "before") is None
    assert trial.judged(None, None) == (None, "before and after not measured")
