"""Tests `cpuchat counters`, as a user's shell runs it. What opens depends on the machine; a collector's file always
does."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.program import COMMAND, HANG_GUARD, run, start
from tests.support.terminal import Terminal

NAMES = [
    "collector", "HSMP files", "HSMP mailbox", "AMD memory controllers", "AMD data fabric",
    "Intel memory controllers", "resctrl", "core counters",
]  # fmt: skip


@pytest.fixture
def collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A collector's file whose figures stay fresh for the whole test."""
    file = tmp_path / "bandwidth.json"
    monkeypatch.setenv("CPUCHAT_BANDWIDTH_FILE", str(file))
    content = {"bw": 288.0, "watts": 250.0, "joules": 9.0, "source": "umc", "power_source": "rapl", "read": 200e9,
               "write": 88e9, "per_l3": [100e9, 188e9], "version": 1}  # fmt: skip
    file.write_text(json.dumps(content))  # without "ts" the file's own time counts
    os.utime(file, (time.time() + 4, time.time() + 4))
    yield file


def test_every_source_is_listed_with_its_reason() -> None:
    found = json.loads(run("counters", "--json").stdout)
    assert [row["name"] for row in found["bandwidth"]] == NAMES
    assert len(found["power"]) == 5
    for row in (*found["bandwidth"], *found["power"]):
        assert row["opens"] or row["why"]


def test_the_list_reads_as_the_json_says() -> None:
    done = run("counters")
    assert done.returncode == 0, done.stderr
    for row in json.loads(run("counters", "--json").stdout)["bandwidth"]:
        [line] = [
            line for line in done.stdout.partition("Power:")[0].splitlines() if line.startswith(f"  {row['name']} ")
        ]
        assert ("available" in line) == row["opens"]
        assert row["why"] in line


def test_what_opens_is_said_to_be_used(collected: Path) -> None:
    done = run("counters")
    used = [line.split() for line in done.stdout.splitlines() if "in use" in line]
    assert used == [["collector", "available,", "in", "use"]] * 2


def test_old_figures_are_named_as_such(collected: Path) -> None:
    os.utime(collected, (1, 1))
    [row] = [row for row in json.loads(run("counters", "--json").stdout)["bandwidth"] if row["name"] == "collector"]
    assert row["opens"] is False
    assert "stale" in row["why"]


def test_watching_prints_a_line_a_second(collected: Path) -> None:
    done = run("counters", "watch", "--seconds", "1")
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith("memory 288.0")
    assert "GB/s (read 200.0, write 88.0) [umc via collector]" in line
    assert "L3 groups 100 188" in line
    assert "250 W [rapl via collector]" in line


def test_watching_for_scripts(collected: Path) -> None:
    done = run("counters", "watch", "--seconds", "1", "--json")
    [row] = [json.loads(line) for line in done.stdout.splitlines()]
    assert row["bw"] == 288.0
    assert row["watts"] == 250.0


def test_watching_ends_with_ctrl_c(collected: Path) -> None:
    program = start("counters", "watch")
    assert program.stdout is not None
    assert program.stdout.readline().startswith(b"memory ")
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(timeout=HANG_GUARD)
    assert program.returncode == 130
    assert b"Traceback" not in said


def test_ctrl_c_in_a_terminal_whose_shell_ignores_it(collected: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        terminal = Terminal(["counters", "watch"], home=tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        terminal.wait_for("memory 288.0")
        terminal.press("ctrl+c")
        assert terminal.wait_for_end() == 130
    finally:
        terminal.close()


def test_the_unit_can_be_installed_as_it_is_printed() -> None:
    done = run("counters", "unit")
    if done.returncode == 2:  # nothing of this system that root alone can change
        assert "root" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# cpuchat-bwd.service")
    assert "\n[Service]\nExecStart=" in done.stdout
    assert done.stdout.endswith("WantedBy=multi-user.target\n")


def test_the_program_of_the_service_goes_into_a_pipe(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "counters", "program"], capture_output=True, timeout=HANG_GUARD)
    assert done.returncode == 0, done.stderr
    assert zipfile.is_zipfile(io.BytesIO(done.stdout))
    terminal = Terminal(["counters", "program"], home=tmp_path)
    assert terminal.wait_for_end() == 2
    assert b"PK" not in terminal.raw
    terminal.close()


@pytest.mark.parametrize("arguments", [("--json", "unit"), ("watch", "--seconds", "0"), ("nothing",)])
def test_wrong_use(arguments: tuple[str, ...]) -> None:
    done = run("counters", *arguments)
    assert done.returncode == 2
    assert done.stdout + done.stderr
