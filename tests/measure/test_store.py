"""What is kept of measurements: of one subject, by several programs at once, whatever happens to the file."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.measure import store
from cpuchat.measure.subject import Subject

ON = Subject(machine="m", cores=(0, 1), model=("f",), settings={"b": 1, "a": [2, "x"]})


def value(subject: Subject = ON, what: str = "speed") -> float | None:
    found = store.find(subject, what, float)
    return found.value if found is not None else None


def test_what_is_kept_is_of_its_subject() -> None:
    assert value() is None
    store.forget(ON, "speed")
    store.keep(ON, "speed", 1.5, n=3, disturbed=True)
    found = store.find(
        Subject(machine="m", cores=(0, 1), model=("f",), settings={"a": [2, "x"], "b": 1}), "speed", float
    )
    assert found is not None and found[1:5] == ("speed", 1.5, 3, True) and found.at > 1.7e9
    assert found.subject == ON
    assert value(Subject(machine="m")) is value(what="other") is store.find(ON, "speed", str) is None
    store.change(ON, "speed", float, lambda before: (before or 0.0) + 1)
    assert value() == 2.5
    store.forget(ON, "speed")
    assert value() is None


def test_a_file_that_another_program_blocks_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    store.keep(ON, "speed", 1.5)
    other = sqlite3.connect(paths.measured_file(), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(store, "_WAIT_SECONDS", 0.01)
    store.keep(ON, "speed", 2.5)
    other.execute("ROLLBACK")
    other.close()
    assert value() is None  # not asked: each look at a file that is blocked would wait
    monkeypatch.setattr(store, "_FILE", store._File())
    assert value() == 1.5


def test_the_latest_come_last_and_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_ENTRIES", 3)
    store.keep(ON, "other", 0.0)
    for core in (0, 1, 2, 3, 1):
        store.keep(Subject(cores=(core,)), "speed", float(core))
    assert [one.value for one in store.find_all("speed", float)] == [2.0, 3.0, 1.0]
    assert value(what="other") == 0.0


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2 + 7)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "damage", [lambda file: file.write_bytes(b"\xff\xfe" * 9000), _cut, _pipe], ids=["garbage", "cut", "pipe"]
)
def test_a_damaged_file_is_set_aside_and_measured_anew(damage: Callable[[Path], None]) -> None:
    file = paths.measured_file()
    for core in range(99):
        store.keep(Subject(cores=(core,)), "speed", 1.5)
    damage(file)
    assert store.find_all("speed", float) == []
    store.keep(ON, "speed", 2.5)
    assert value() == 2.5 and file.with_name("measured.db.damaged").exists()


def test_a_file_that_is_emptied_while_it_is_open_is_made_anew() -> None:
    store.keep(ON, "speed", 1.5)
    os.truncate(paths.measured_file(), 0)
    assert value() is None
    store.keep(ON, "speed", 2.5)
    assert value() == 2.5
    os.truncate(paths.measured_file(), 0)
    store.change(ON, "speed", float, lambda before: 3.5)
    store.keep(ON, "speed", 4.5)
    assert value() == 4.5


def test_values_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    store.keep(ON, "speed", "fast")
    assert value() is None and store.find_all("speed", float) == []
    store.keep(ON, "caf\udce9", 1.0)
    store.keep(Subject(machine="caf\udce9"), "speed", 1.0)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CPUCHAT_CACHE_DIR", str(tmp_path / "file"))
    store.keep(ON, "speed", 1.0)
    assert value() is None


@pytest.mark.slow
def test_programs_that_write_at_once_lose_nothing() -> None:
    code = (
        "import sys; from cpuchat.measure import store; from cpuchat.measure.subject import Subject\n"
        "store._WAIT_SECONDS = 1000\n"
        "for n in sys.argv[1:]:\n"
        "    store.keep(Subject(cores=(int(n),)), 'speed', 1.0)\n"
        "    store.change(Subject(), 'sum', float, lambda before: (before or 0.0) + 1)"
    )
    programs = [subprocess.Popen([sys.executable, "-c", code, *map(str, range(first, 40, 2))]) for first in range(2)]
    assert [program.wait() for program in programs] == [0, 0]
    assert len(store.find_all("speed", float)) == value(Subject(), "sum") == 40
