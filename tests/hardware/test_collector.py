"""Tests the collector: the real program with its signals, and its loop on a simulated machine."""

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
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import cpuchat
from cpuchat.base.errors import UsageError
from cpuchat.hardware import monitor
from cpuchat.hardware.collector import NOTHING_TO_READ, collect
from cpuchat.hardware.collector_unit import changeable, program_file, unit
from cpuchat.hardware.counters.collector_file import CollectedPower, CollectorFile
from tests.hardware.counters.simulated import Simulated, umc
from tests.hardware.trees import make_tree, write

pytestmark = pytest.mark.slow

HANG_GUARD = 180
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
    assert [getattr(value, "source", None) for value in found] == ["hsmp via collector", "hsmp via collector"]


def test_one_measurement(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "bandwidth.json"
    assert collect(output, Rounds(1, output), once=True, root=root, kernel=Simulated(answers=dict(HSMP)).calls) == 0
    assert json.loads(capsys.readouterr().out)["bw"] == 288.0
    assert not output.exists()


def test_a_place_that_cannot_be_written(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "absent" / "bandwidth.json"
    assert collect(output, Rounds(9, output), root=root, kernel=Simulated(answers=dict(HSMP)).calls) == 1
    assert "Cannot write" in capsys.readouterr().err


def test_nothing_to_read_ends_it_with_the_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    output = tmp_path / "bandwidth.json"
    assert collect(output, Rounds(9, output), root=root, kernel=Simulated().calls) == NOTHING_TO_READ
    said = capsys.readouterr().err
    assert "no counter is available" in said and "modprobe amd_hsmp" in said
    assert not output.exists()


_PROGRAM = """
import sys
from pathlib import Path
from cpuchat.hardware import collector, monitor

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
            time.sleep(0.01)
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
        f"import sys; sys.path.insert(0, {str(Path(cpuchat.__file__).parents[1])!r});"
        "from cpuchat.hardware import collector; collector.main(['--once']);"
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


def test_the_unit_runs_a_copy_of_roots_with_one_right() -> None:
    text = unit(Path("/usr/bin/env"))
    service = parsed(text)
    program = "/usr/local/lib/cpuchat/cpuchat-bwd"
    assert service["ExecStart"] == f"/usr/bin/env -I -S {program} --output /run/cpuchat/bandwidth.json"
    assert f"sudo install -D -o root -g root -m 0755 /dev/stdin {program}" in text
    assert str(Path(sys.prefix)) not in text and str(Path(__file__).parents[2]) not in text
    assert service["AmbientCapabilities"] == service["CapabilityBoundingSet"] == "CAP_PERFMON"
    assert service["NoNewPrivileges"] == service["DynamicUser"] == service["ProtectHome"] == "yes"
    assert service["RestartPreventExitStatus"] == str(NOTHING_TO_READ)


def test_the_unit_says_how_to_install_and_remove_it() -> None:
    text = "\n".join(line for line in unit(Path("/usr/bin/env")).splitlines() if line.startswith("#"))
    assert "sudo tee /etc/systemd/system/cpuchat-bwd.service" in text
    assert "systemctl enable --now" in text and "systemctl disable --now" in text
    assert "sudo rm -r /usr/local/lib/cpuchat" in text


def test_odd_paths_are_quoted() -> None:
    assert '"/usr/my py\\"thon%%n"' in unit(Path('/usr/my py"thon%n'))


@pytest.mark.parametrize("mode", [0o757, 0o775, 0o1777])
def test_what_a_user_can_change_is_not_run(tmp_path: Path, mode: int) -> None:
    if os.getuid() == 0:
        os.chown(tmp_path, *NOBODY)
    open_folder = folder(tmp_path / "lib", 0o755)
    (program := open_folder / "program").touch()
    assert changeable(program) is not None  # its folder's folder is another user's
    with pytest.raises(UsageError, match="other than root can change"):
        unit(Path("/usr/bin/env"), program)
    mine = os.getuid()
    if os.getuid() == 0:
        os.chown(tmp_path, 0, 0)
    assert changeable(program, mine) not in (program, open_folder, tmp_path)
    open_folder.chmod(mode)
    if mode == 0o775:
        if os.getuid() != 0:
            pytest.skip("only root gives a folder to another group")
        os.chown(open_folder, 0, NOBODY[1])
    assert changeable(program, mine) == open_folder
    link = tmp_path / "link"
    link.symlink_to(program)
    assert changeable(link, mine) == open_folder


def test_the_program_is_one_file_that_needs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "cpuchat-bwd"
    file.write_bytes(program_file())
    assert program_file() == file.read_bytes()
    environment = {"PATH": "/usr/bin:/bin"}
    run = [sys.executable, "-I", "-S", str(file)]
    helped = subprocess.run([*run, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert helped.returncode == 0 and "cpuchat-bwd" in helped.stdout, helped.stderr
    done = subprocess.run([*run, "--once"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, NOTHING_TO_READ), done.stderr
    assert "Traceback" not in done.stderr and "No module" not in done.stderr + done.stdout


def test_a_file_of_another_collector_is_left_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "bandwidth.json"
    output.write_text("another's")

    def refuse(*_: object) -> None:  # tests may run as root, who may write everywhere
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("cpuchat.hardware.collector.write", refuse)
    assert collect(output, Rounds(9, output), root=root, kernel=Simulated(answers=dict(HSMP)).calls) == 1
    assert "Permission denied" in capsys.readouterr().err
    assert output.read_text() == "another's"


def test_a_folder_in_the_files_place_is_no_traceback(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = folder(tmp_path / "taken", 0o755)
    stop = threading.Event()
    assert collect(output, stop, root=root, kernel=Simulated(answers=dict(HSMP)).calls) == 1
    assert "Cannot write" in capsys.readouterr().err
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
