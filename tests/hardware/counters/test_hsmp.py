"""Tests HSMP files and mailbox: values, units, and that nothing but questions is ever sent."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest

from cpuchat.hardware.counters.base import CannotCount
from cpuchat.hardware.counters.hsmp import HsmpFiles, HsmpMailbox, Mailbox, unit_of
from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.counters.simulated import Simulated, refused
from tests.hardware.trees import make_tree, write

GB = 1e9
GENOA = 460.8 * GB
SET_MESSAGES = (0x05, 0x08, 0x09, 0x0C, 0x0D, 0x0E, 0x12, 0x1F, 0x20, 0x21, 0x22)


def server(tmp_path: Path, name: str = "epyc-9354") -> tuple[Path, Topology]:
    root = make_tree(tmp_path, name)
    write(root, {"dev/hsmp": ""})
    return root, read_topology(root)


def word(largest: int, used: int, percent: int) -> int:
    return largest << 20 | used << 8 | percent


def files(root: Path, socket: int, largest: int, used: int) -> None:
    base = f"sys/devices/platform/AMDI0097:0{socket}"
    write(root, {f"{base}/ddr_max_bw": str(largest), f"{base}/ddr_utilised_bw_input": str(used)})


def test_the_message_byte_for_byte(tmp_path: Path) -> None:
    root, topology = server(tmp_path)
    machine = Simulated(answers={(0x14, 0): word(460, 288, 62)})
    counter = HsmpMailbox(topology, root, machine.calls, GENOA)
    assert machine.opened_files == [root / "dev/hsmp"]
    assert machine.sent == [bytes.fromhex("14000000 0000 0100") + bytes(32) + bytes.fromhex("0000 0000")]
    found = counter.sample(1.0)
    assert found is not None
    assert found.total == 288 * GB
    assert (found.source, found.scope, found.read, found.write) == ("hsmp", "machine", None, None)
    counter.close()
    assert machine.closed_files == [7]


def test_both_sockets_are_asked_and_added(tmp_path: Path) -> None:
    root, topology = server(tmp_path, "2x-epyc-7543")
    machine = Simulated(answers={(0x14, 0): word(204, 150, 73), (0x14, 1): word(204, 20, 9)})
    found = HsmpMailbox(topology, root, machine.calls, 2 * 204.8 * GB).sample(1.0)
    assert found is not None
    assert found.total == 170 * GB
    assert [struct.unpack_from("=H", sent, 40)[0] for sent in machine.sent] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("largest", "theoretical", "unit"),
    [
        (460, GENOA, GB),
        (3686, GENOA, GB / 8),  # the same in Gbit/s
        (204, 204.8 * GB, GB),
        (1638, 204.8 * GB, GB / 8),
        (614, None, GB),
        (1638, None, GB / 8),
    ],
)
def test_the_unit_is_told_by_what_the_memory_can_carry(largest: int, theoretical: float | None, unit: float) -> None:
    assert unit_of(largest, theoretical) == unit


def test_gigabits_are_recognized(tmp_path: Path) -> None:
    root, topology = server(tmp_path)
    machine = Simulated(answers={(0x14, 0): word(3686, 2304, 62)})
    found = HsmpMailbox(topology, root, machine.calls, GENOA).sample(1.0)
    assert found is not None
    assert found.total == 288 * GB


def test_only_questions_can_be_sent(tmp_path: Path) -> None:
    root, _ = server(tmp_path)
    machine = Simulated(answers=dict.fromkeys(((message, 0) for message in SET_MESSAGES), 1))
    mailbox = Mailbox(root, machine.calls)
    for message in SET_MESSAGES:
        with pytest.raises(ValueError, match="not a GET message"):
            mailbox.get(message, 0)
    assert machine.sent == []


def test_the_device_is_opened_for_reading(tmp_path: Path) -> None:
    import fcntl
    import os

    from cpuchat.hardware.counters.perf_events import Kernel

    root, _ = server(tmp_path)
    fd = Kernel().open(root / "dev/hsmp")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    os.close(fd)
    assert flags & os.O_ACCMODE == os.O_RDONLY


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (errno.ENOMSG, "firmware does not support"),
        (errno.ETIMEDOUT, "does not respond"),
        (errno.EPERM, "not permitted"),
    ],
)
def test_a_refused_question(tmp_path: Path, code: int, why: str) -> None:
    root, topology = server(tmp_path)
    machine = Simulated(answers={(0x14, 0): refused(code)})
    with pytest.raises(CannotCount, match=why):
        HsmpMailbox(topology, root, machine.calls, GENOA)
    assert machine.closed_files == [7]


def test_firmware_that_tells_nothing(tmp_path: Path) -> None:
    root, topology = server(tmp_path)
    machine = Simulated(answers={(0x14, 0): 0})
    with pytest.raises(CannotCount, match="does not report"):
        HsmpMailbox(topology, root, machine.calls, GENOA)
    assert machine.closed_files == [7]


def test_a_busy_mailbox_is_forgiven_a_few_times(tmp_path: Path) -> None:
    root, topology = server(tmp_path)
    machine = Simulated(answers={(0x14, 0): word(460, 100, 21)})
    counter = HsmpMailbox(topology, root, machine.calls, GENOA)
    machine.answers[0x14, 0] = refused(errno.ETIMEDOUT)
    assert [counter.sample(float(second)) for second in range(3)] == [None] * 3
    with pytest.raises(OSError):
        counter.sample(4.0)


def test_no_device_and_no_right(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    topology = read_topology(root)
    with pytest.raises(CannotCount, match="/dev/hsmp does not exist") as caught:
        HsmpMailbox(topology, root, Simulated().calls, GENOA)
    assert "modprobe amd_hsmp" in caught.value.how

    def forbidden(path: Path) -> int:
        raise refused(errno.EACCES)

    from cpuchat.hardware.counters.perf_events import Kernel

    with pytest.raises(CannotCount, match="not readable"):
        HsmpMailbox(topology, root, Kernel(open=forbidden), GENOA)


@pytest.mark.parametrize("name", ["xeon-6430", "hybrid-desktop", "vm"])
def test_other_cpus_have_none(tmp_path: Path, name: str) -> None:
    root, topology = server(tmp_path, name)
    machine = Simulated()
    with pytest.raises(CannotCount, match="only"):
        HsmpMailbox(topology, root, machine.calls, GENOA)
    assert machine.sent == []


def test_files_of_each_socket_are_added(tmp_path: Path) -> None:
    root, topology = server(tmp_path, "2x-epyc-7543")
    files(root, 0, 204, 120)
    files(root, 1, 204, 3)
    counter = HsmpFiles(topology, root, 2 * 204.8 * GB)
    found = counter.sample(1.0)
    assert found is not None
    assert found.total == 123 * GB


def test_files_of_the_platform_driver(tmp_path: Path) -> None:
    root, topology = server(tmp_path)
    base = "sys/devices/platform/amd_hsmp/socket0"
    write(root, {f"{base}/ddr_max_bw": "460", f"{base}/ddr_utilised_bw_input": "288"})
    found = HsmpFiles(topology, root, GENOA).sample(1.0)
    assert found is not None
    assert found.total == 288 * GB


def test_files_that_are_absent_or_go_away(tmp_path: Path) -> None:
    root, topology = server(tmp_path)
    with pytest.raises(CannotCount, match="no such files"):
        HsmpFiles(topology, root, GENOA)
    files(root, 0, 460, 100)
    counter = HsmpFiles(topology, root, GENOA)
    write(root, {"sys/devices/platform/AMDI0097:00/ddr_utilised_bw_input": "n/a"})
    assert [counter.sample(float(second)) for second in range(3)] == [None] * 3
    with pytest.raises(OSError, match="reports no bandwidth"):
        counter.sample(4.0)


def test_one_socket_of_two_is_not_the_machine(tmp_path: Path) -> None:
    root, topology = server(tmp_path, "2x-epyc-7543")
    files(root, 0, 204, 120)
    with pytest.raises(CannotCount, match="1 of 2 sockets"):
        HsmpFiles(topology, root, 2 * 204.8 * GB)


@pytest.mark.parametrize("text", ["-1", "-99999999999"])
def test_negative_figures_are_none(tmp_path: Path, text: str) -> None:
    root, topology = server(tmp_path)
    files(root, 0, 460, 100)
    counter = HsmpFiles(topology, root, GENOA)
    write(root, {"sys/devices/platform/AMDI0097:00/ddr_utilised_bw_input": text})
    assert counter.sample(1.0) is None
