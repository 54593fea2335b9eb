"""Tests the file that a collector writes: ours, anyone's, an old one, and nonsense."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from cpuchat.hardware.counters.base import CannotCount
from cpuchat.hardware.counters.collector_file import DEFAULT, VARIABLE, CollectedPower, CollectorFile, place, write
from cpuchat.hardware.counters.perf_events import Kernel
from cpuchat.telemetry.machine import Bandwidth, MachineSample, Power

GB = 1e9
TS = 1_700_000_000.0
FULL = MachineSample(
    Bandwidth(300 * GB, "umc", "machine", 240 * GB, 60 * GB, (100 * GB, 200 * GB)), Power(280.0, 5000.0, "rapl (perf)")
)


def at(seconds: float) -> Kernel:
    """Return a kernel whose clock is that many seconds after the file was written."""
    return Kernel(wall=lambda: TS + seconds)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / DEFAULT.relative_to("/")
    path.parent.mkdir(parents=True)
    return path


def test_what_is_written_is_read(tmp_path: Path, file: Path) -> None:
    write(file, FULL, TS, 460.8 * GB)
    counter = CollectorFile(tmp_path, at(1))
    found = counter.sample(1.0)
    assert found == Bandwidth(300 * GB, "umc via collector", "machine", 240 * GB, 60 * GB, (100 * GB, 200 * GB))
    assert counter.name == "umc via collector"


def test_the_file_is_plain_for_other_programs(file: Path) -> None:
    write(file, FULL, TS, 460.8 * GB)
    content = json.loads(file.read_text())
    assert (content["bw"], content["util"], content["ts"]) == (300.0, 65.1, TS)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert list(file.parent.iterdir()) == [file]


def test_the_file_is_replaced_in_one_step(file: Path) -> None:
    write(file, FULL, TS)
    with file.open() as reading:  # who has it open reads the old one to its end
        write(file, MachineSample(no_bandwidth="none", no_power="none"), TS + 1)
        assert json.loads(reading.read())["bw"] == 300.0
    assert json.loads(file.read_text())["bw"] is None


def test_any_program_may_write_it(tmp_path: Path, file: Path) -> None:
    file.write_text(json.dumps({"bw": 212.5, "util": 46.1, "ts": TS}))
    found = CollectorFile(tmp_path, at(2)).sample(1.0)
    assert found == Bandwidth(212.5 * GB, "collector", "machine")
    with pytest.raises(CannotCount, match="no power"):
        CollectedPower(tmp_path, at(2))


def test_a_file_without_a_time_is_as_old_as_the_file(tmp_path: Path, file: Path) -> None:
    file.write_text(json.dumps({"bw": 10}))
    os.utime(file, (TS, TS))
    assert CollectorFile(tmp_path, at(3)).sample(1.0) is not None
    with pytest.raises(CannotCount, match="stale"):
        CollectorFile(tmp_path, at(9))


@pytest.mark.parametrize("seconds", [5.1, 3600, -6])
def test_old_figures_are_refused(tmp_path: Path, file: Path, seconds: float) -> None:
    write(file, FULL, TS)
    with pytest.raises(CannotCount, match="stale") as caught:
        CollectorFile(tmp_path, at(seconds))
    assert "restart" in caught.value.how


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "null",
        "[" * 5000,
        "\x00\xff",
        '{"bw": 1e999, "ts": 1700000000}',
        '{"bw": -3, "ts": 1700000000}',
        '{"bw": true, "ts": 1700000000}',
        '{"bw": "fast", "ts": 1700000000}',
        '{"bw": ' + "9" * 400 + ', "ts": 1700000000}',
        '{"ts": 1700000000}',
        '{"bw": 5, "ts": NaN}',
    ],
)
def test_nonsense_is_refused(tmp_path: Path, file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(CannotCount):
        CollectorFile(tmp_path, at(0))
    with pytest.raises(CannotCount):
        CollectedPower(tmp_path, at(0))


def test_control_characters_do_not_get_through(tmp_path: Path, file: Path) -> None:
    file.write_text(json.dumps({"bw": 1, "ts": TS, "source": "\x1b[31mumc\n" + "x" * 900}))
    name = CollectorFile(tmp_path, at(0)).name
    assert name.isprintable() and len(name) < 60
    file.write_text(json.dumps({"ts": TS, "no_bandwidth": "a\x1bb"}))
    with pytest.raises(CannotCount, match="ab"):
        CollectorFile(tmp_path, at(0))


def test_partly_wrong_groups_are_left_out(tmp_path: Path, file: Path) -> None:
    file.write_text(json.dumps({"bw": 1, "ts": TS, "per_l3": [1, "two"], "read": [], "write": 5}))
    found = CollectorFile(tmp_path, at(0)).sample(1.0)
    assert found == Bandwidth(1 * GB, "collector", "machine", None, 5.0, ())


def test_a_collector_that_stops_is_given_a_moment(tmp_path: Path, file: Path) -> None:
    write(file, FULL, TS)
    counter = CollectorFile(tmp_path, at(0))
    file.unlink()
    assert [counter.sample(float(second)) for second in range(3)] == [None] * 3
    with pytest.raises(CannotCount, match="not running") as caught:
        counter.sample(3.0)
    assert "cpuchat counters unit" in caught.value.how


def test_joules_since_it_was_opened(tmp_path: Path, file: Path) -> None:
    def energy(joules: float) -> None:
        write(file, MachineSample(power=Power(250.0, joules, "rapl (perf)")), TS)

    energy(5000)
    meter = CollectedPower(tmp_path, at(0))
    energy(5250)
    assert meter.sample(1.0) == Power(250.0, 250.0, "rapl (perf) via collector")
    energy(40)  # the collector started again
    assert meter.sample(2.0) == Power(250.0, 250.0, "rapl (perf) via collector")
    energy(100)
    assert meter.sample(3.0) == Power(250.0, 310.0, "rapl (perf) via collector")


def test_another_file_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place() == DEFAULT
    other = tmp_path / "latest.json"
    monkeypatch.setenv(VARIABLE, str(other))
    other.write_text(json.dumps({"bw": 7, "ts": TS}))
    found = CollectorFile(kernel=at(1)).sample(1.0)
    assert found is not None
    assert found.total == 7 * GB


@pytest.mark.parametrize("key", ["bw", "bytes_per_s", "watts", "joules"])
@pytest.mark.parametrize("value", [1e305, 1e308, -1, "9", [], {}])
def test_numbers_that_no_machine_has(tmp_path: Path, file: Path, key: str, value: object) -> None:
    content: dict[str, object] = {"ts": TS, "bw": "x", "watts": 5, "joules": 5}
    file.write_text(json.dumps(content | {key: value}))
    opener = CollectedPower if key in ("watts", "joules") else CollectorFile
    if key == "joules" and isinstance(value, float):
        value = None  # a large count is no reason to doubt the watts
        assert CollectedPower(tmp_path, at(0)).sample(1.0) is not None
    else:
        with pytest.raises(CannotCount, match=r"no (bandwidth|power)"):
            opener(tmp_path, at(0))


def test_a_list_of_groups_that_is_endless_is_left_out(tmp_path: Path, file: Path) -> None:
    file.write_text(json.dumps({"bw": 1, "ts": TS, "per_l3": [1] * 5000}))
    found = CollectorFile(tmp_path, at(0)).sample(1.0)
    assert found is not None and found.per_l3 == ()


def test_a_pipe_in_its_place_does_not_block(tmp_path: Path, file: Path) -> None:
    os.mkfifo(file)
    before = open_files()
    with pytest.raises(CannotCount, match="not running"):
        CollectorFile(tmp_path, at(0))
    file.unlink()
    file.mkdir()
    with pytest.raises(CannotCount, match="not running"):
        CollectorFile(tmp_path, at(0))
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_file_without_permission_is_not_said_to_be_absent(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:  # tests may run as root, who may read everything
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CannotCount, match="not readable") as caught:
        CollectorFile(tmp_path, at(0))
    assert f"chmod a+r {file}" in caught.value.how


def test_a_collector_that_lost_its_counter_gives_way_to_the_next(tmp_path: Path, file: Path) -> None:
    write(file, FULL, TS)
    counter = CollectorFile(tmp_path, at(0))
    write(file, MachineSample(no_bandwidth="umc is gone", power=FULL.power), TS)
    assert [counter.sample(float(second)) for second in range(3)] == [None] * 3
    with pytest.raises(CannotCount, match="umc is gone"):
        counter.sample(3.0)


def test_links_that_others_left_are_not_followed(tmp_path: Path, file: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o600)
    (file.parent / f".{file.name}.{os.getpid()}").symlink_to(victim)
    file.symlink_to(victim)
    write(file, FULL, TS)
    assert victim.read_text() == "mine"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert not file.is_symlink()
    assert list(file.parent.iterdir()) == [file]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write(tmp_path / "taken", FULL, TS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]
