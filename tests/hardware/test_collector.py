"""The collector: the real program with its signals, and its loop on a simulated machine."""

from __future__ import annotations

import configparser
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from cpuchat.hardware import monitor
from cpuchat.hardware.collector import NOTHING_TO_READ, collect
from cpuchat.hardware.collector_unit import unit
from cpuchat.hardware.counters.collector_file import CollectedPower, CollectorFile
from tests.hardware.counters.simulated import Simulated, umc
from tests.hardware.trees import make_tree, write

HANG_GUARD = 60
NOBODY = (65534, 65534)
HSMP = {(0x14, 0): 460 << 20 | 288 << 8, (4, 0): 250_000}


class Rounds(threading.Event):
    """Stops after some rounds without waiting, and looks at the file in each."""

    def __init__(self, rounds: int, file: Path) -> None:
        super().__init__()
        self._left = rounds
        self._file = file
        self.seen: list[dict[str, object]] = []

    def wait(self, timeout: float | None = None) -> bool:
        if self._file.exists():
            self.seen.append(json.loads(self._file.read_text()))
        self._left -= 1
        if self._left <= 0:
            self.set()
        return self.is_set()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(make_tree(tmp_path, "epyc-9354"), {"dev/hsmp": ""})


def test_it_writes_while_it_runs_and_leaves_nothing(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "bandwidth.json"
    machine = Simulated(answers=dict(HSMP))
    stop = Rounds(3, output)
    assert collect(output, stop, root=root, kernel=machine.calls) == 0
    assert len(stop.seen) == 3
    assert {(seen["bw"], seen["source"], seen["watts"], seen["ts"]) for seen in stop.seen} == {
        (288.0, "hsmp", 250.0, machine.wall)
    }
    assert all(seen["util"] == 62.5 for seen in stop.seen)
    assert not output.exists()
    assert machine.closed_files == [7, 7]


def test_the_app_reads_what_it_writes(root: Path) -> None:
    output = root / "run/cpuchat/bandwidth.json"
    output.parent.mkdir(parents=True)
    machine = Simulated(answers=dict(HSMP))
    found: list[object] = []

    class Reader(Rounds):
        def wait(self, timeout: float | None = None) -> bool:
            found.append(CollectorFile(root, machine.calls).sample(1.0))
            found.append(CollectedPower(root, machine.calls).sample(1.0))
            return super().wait(timeout)

    collect(output, Reader(1, output), root=root, kernel=machine.calls)
    assert [getattr(value, "source", None) for value in found] == ["hsmp by collector", "hsmp by collector"]


def test_one_measurement(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bandwidth.json"
    assert collect(output, Rounds(1, output), once=True, root=root, kernel=Simulated(answers=dict(HSMP)).calls) == 0
    assert json.loads(capsys.readouterr().out)["bw"] == 288.0
    assert not output.exists()


def test_a_place_that_cannot_be_written(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "absent" / "bandwidth.json"
    assert collect(output, Rounds(9, output), root=root, kernel=Simulated(answers=dict(HSMP)).calls) == 1
    assert "cannot be written: No such file" in capsys.readouterr().err


def test_nothing_to_read_ends_it_with_the_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    output = tmp_path / "bandwidth.json"
    assert collect(output, Rounds(9, output), root=root, kernel=Simulated().calls) == NOTHING_TO_READ
    said = capsys.readouterr().err
    assert "no counter to read" in said and "modprobe amd_hsmp" in said
    assert not output.exists()


_PROGRAM = """
import sys
from pathlib import Path
from cpuchat.hardware import collector, monitor
from cpuchat.hardware.counters import ladder

class Meter:  # what opens on this machine is not known, so a power meter that always does takes its place
    name, least_seconds = "test", 0.1
    def sample(self, now):
        from cpuchat.telemetry.machine import Power
        return Power(100.0, 5.0, "test")
    def close(self):
        pass

monitor.power_openers = lambda *_, **__: [("test", Meter)]
sys.exit(collector.main(["--output", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_program_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "bandwidth.json"
    program = subprocess.Popen([sys.executable, "-c", _PROGRAM, str(output)], stderr=subprocess.PIPE)
    try:
        while not output.exists() and program.poll() is None:
            pass
        assert json.loads(output.read_text())["watts"] == 100.0
        program.send_signal(number)
        _, said = program.communicate(timeout=HANG_GUARD)
    finally:
        program.kill()
        program.wait()
    assert program.returncode == 0
    assert said == b""
    assert list(tmp_path.iterdir()) == []


def test_it_needs_the_standard_library_only() -> None:
    code = (
        "import sys; from cpuchat.hardware import collector; collector.main(['--once']);"
        "print(*{name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=HANG_GUARD)
    foreign = {name for name in done.stdout.splitlines()[-1].split() if not name.startswith(("_", "sitecustomize"))}
    assert foreign == {"cpuchat"}, done.stderr


def parsed(text: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser["Service"]


def folder(path: Path, mode: int) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def test_the_unit_runs_this_interpreter_with_one_right() -> None:
    service = parsed(unit())
    assert service["ExecStart"].startswith(sys.executable)
    assert service["ExecStart"].endswith("-m cpuchat.hardware.collector --output /run/cpuchat/bandwidth.json")
    assert service["AmbientCapabilities"] == service["CapabilityBoundingSet"] == "CAP_PERFMON"
    assert service["NoNewPrivileges"] == "yes"
    assert service["RestartPreventExitStatus"] == str(NOTHING_TO_READ)


def test_the_unit_says_how_to_install_and_remove_it() -> None:
    comments = [line for line in unit().splitlines() if line.startswith("#")]
    text = "\n".join(comments)
    assert "sudo tee /etc/systemd/system/cpuchat-bwd.service" in text
    assert "systemctl enable --now" in text and "systemctl disable --now" in text


def test_a_user_of_its_own_where_that_user_can_get_in() -> None:
    assert parsed(unit(Path("/usr/bin/env"), Path("/usr/bin")))["DynamicUser"] == "yes"


def test_the_owner_where_the_folder_is_closed(tmp_path: Path) -> None:
    shut = folder(tmp_path / "home", 0o700) / "python"
    shut.touch()
    service = parsed(unit(shut, Path("/usr/bin")))
    assert "DynamicUser" not in service
    assert service["User"] == shut.owner()


def test_odd_paths_are_quoted() -> None:
    text = unit(Path('/usr/my py"thon%n'), Path("/usr/bin"))
    assert 'ExecStart="/usr/my py\\"thon%%n" -m' in text


def test_a_link_to_the_systems_interpreter_does_not_make_it_the_administrators(tmp_path: Path) -> None:
    """The interpreter of a virtual environment is a link to a file that the administrator owns."""
    shut = folder(tmp_path / "home", 0o700)
    if os.getuid() == 0:  # else it is not the administrator's anyway
        os.chown(shut, *NOBODY)
    (shut / "bin").mkdir()
    (shut / "bin/python").symlink_to("/usr/bin/env")
    service = parsed(unit(shut / "bin/python", Path("/usr/bin")))
    assert service["User"] == shut.owner()


def test_an_owner_without_a_name_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    shut = folder(tmp_path / "home", 0o700) / "python"
    shut.touch()
    assert parsed(unit(shut, Path("/usr/bin")))["User"] == str(os.getuid())


def test_a_package_that_only_its_owner_may_read() -> None:
    with TemporaryDirectory() as code:  # closed itself, in a folder that is open to all
        assert parsed(unit(Path("/usr/bin/env"), Path(code)))["User"] == Path(code).owner()
        Path(code).chmod(0o755)
        assert "User" not in parsed(unit(Path("/usr/bin/env"), Path(code)))


def test_a_file_of_another_collector_is_left_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "bandwidth.json"
    output.write_text("another's")

    def refuse(*_: object) -> None:  # tests may run as root, who may write everywhere
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("cpuchat.hardware.collector.write", refuse)
    assert collect(output, Rounds(9, output), root=root, kernel=Simulated(answers=dict(HSMP)).calls) == 1
    assert "cannot be written: Permission denied" in capsys.readouterr().err
    assert output.read_text() == "another's"


def test_a_folder_in_the_files_place_is_no_traceback(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = folder(tmp_path / "taken", 0o755)
    stop = threading.Event()
    assert collect(output, stop, root=root, kernel=Simulated(answers=dict(HSMP)).calls) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert output.is_dir()


def test_the_first_file_has_figures_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters tell something from the second sample on; who reads before that would take another source."""
    root = make_tree(tmp_path, "epyc-9354")
    umc(root, 0, "0")
    output = tmp_path / "bandwidth.json"
    machine = Simulated()
    seconds = itertools.count()
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))

    class Counting(Rounds):
        def wait(self, timeout: float | None = None) -> bool:
            machine.run(1, lambda _: 1e9 / 64)
            return super().wait(timeout)

    stop = Counting(3, output)
    assert collect(output, stop, root=root, kernel=machine.calls) == 0
    assert [seen["source"] for seen in stop.seen] == ["umc", "umc"]
