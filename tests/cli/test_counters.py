"""Tests `cpuchat counters`: as a user's shell runs it here, and on a simulated machine whose counters open."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpuchat.cli import machine
from cpuchat.cli import main as program
from cpuchat.hardware import monitor
from cpuchat.hardware.counters import uncore
from tests.cli.program import run
from tests.hardware.counters.simulated import Simulated, energy, umc
from tests.hardware.trees import make_tree


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose controllers count 288 GB/s, and whose packages take 250 W, however long a second is here."""
    root = make_tree(tmp_path, "epyc-9354")
    for channel in range(12):
        umc(root, channel, "0")
    energy(root, "0")
    kernel = Simulated()
    now = [0.0]

    def clock() -> float:
        return now[0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        kernel.run(seconds, lambda one: {8: 250 * 2**32}.get(one.type, 12e9 / 64))

    monkeypatch.setattr(machine, "ROOT", root)
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(machine, "time", SimpleNamespace(sleep=sleep, time=clock))
    monkeypatch.setattr(uncore, "Kernel", lambda: kernel.calls)


def test_the_list_says_what_opens_or_why_not() -> None:
    found = json.loads(run("counters", "--json").stdout)
    done = run("counters")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for name in ("bandwidth", "power"):
        assert bool(found[name]["name"]) != bool(found[name]["why"])
        assert (found[name]["name"] or found[name]["why"]) in text


@pytest.mark.usefixtures("counting")
def test_what_opens_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["counters"]) == 0
    assert capsys.readouterr().out == "Memory traffic: umc\nPower: rapl\n"


@pytest.mark.usefixtures("counting")
def test_watching_prints_a_line_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["counters", "watch", "--seconds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["memory 288.0 of 461 GB/s (read 144.0, write 144.0) [umc] · 250 W [rapl]"] * 2


@pytest.mark.usefixtures("counting")
def test_watching_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["counters", "watch", "--seconds", "1", "--json"]) == 0
    [row] = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["bandwidth"] == {"total": 288e9, "source": "umc", "read": 144e9, "write": 144e9}
    assert row["power"] == {"watts": 250.0, "joules": 250.0, "source": "rapl"}


def test_nothing_to_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "ROOT", make_tree(tmp_path, "vm"))
    assert program.main(["counters", "watch"]) == 1
    assert "No counter is available: virtual machines expose no such counters" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--json", "watch"), ("watch", "--seconds", "0"), ("nothing",)])
def test_wrong_use(arguments: tuple[str, ...]) -> None:
    done = run("counters", *arguments)
    assert done.returncode == 2
    assert done.stdout + done.stderr
