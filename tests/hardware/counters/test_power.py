"""Tests watts and joules: RAPL with its wraps, perf's energy counter, and HSMP."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cpuchat.hardware.counters.base import CannotCount
from cpuchat.hardware.counters.hsmp import HsmpPower, HsmpSensor
from cpuchat.hardware.counters.power import PackageEnergy, Rapl
from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.counters.simulated import Simulated, pmu, refused
from tests.hardware.trees import make_tree, write

ZONES = "sys/class/powercap"
RANGE = 65_532_610_987
JOULE = 1_000_000


def zone(root: Path, number: str, name: str, energy: int | str, wraps: int = RANGE) -> None:
    base = f"{ZONES}/intel-rapl:{number}"
    write(root, {f"{base}/name": name, f"{base}/energy_uj": str(energy), f"{base}/max_energy_range_uj": str(wraps)})


def two_packages(root: Path, first: int, second: int) -> None:
    zone(root, "0", "package-0", first)
    zone(root, "1", "package-1", second)


def test_all_packages_and_nothing_twice(tmp_path: Path) -> None:
    two_packages(tmp_path, 100 * JOULE, 200 * JOULE)
    zone(tmp_path, "0:0", "core", 50 * JOULE)
    zone(tmp_path, "2", "psys", 50 * JOULE)
    meter = Rapl(tmp_path)
    assert meter.sample(1.0) is None
    two_packages(tmp_path, 180 * JOULE, 260 * JOULE)
    zone(tmp_path, "0:0", "core", 5000 * JOULE)
    zone(tmp_path, "2", "psys", 5000 * JOULE)
    found = meter.sample(1.5)
    assert found is not None
    assert (found.watts, found.joules, found.source) == (280.0, 140.0, "rapl")
    two_packages(tmp_path, 190 * JOULE, 260 * JOULE)
    found = meter.sample(2.5)
    assert found is not None
    assert (found.watts, found.joules) == (10.0, 150.0)


def test_the_count_wraps(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", RANGE - 30 * JOULE)
    meter = Rapl(tmp_path)
    meter.sample(1.0)
    zone(tmp_path, "0", "package-0", 70 * JOULE)
    found = meter.sample(1.5)
    assert found is not None
    assert found.watts == 200.0
    assert found.joules == 100.0


def test_a_reset_is_no_wrap(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 30_000 * JOULE)
    meter = Rapl(tmp_path)
    meter.sample(1.0)
    zone(tmp_path, "0", "package-0", 5 * JOULE)  # as a wrap: 35 kJ in half a second
    assert meter.sample(1.5) is None
    zone(tmp_path, "0", "package-0", 105 * JOULE)
    found = meter.sample(2.5)
    assert found is not None
    assert (found.watts, found.joules) == (100.0, 100.0)


def test_a_pause_longer_than_a_wrap_is_not_guessed_at(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 0)
    meter = Rapl(tmp_path)
    meter.sample(0.0)
    zone(tmp_path, "0", "package-0", 1000 * JOULE)
    assert meter.sample(600.0) is None
    zone(tmp_path, "0", "package-0", 1100 * JOULE)
    found = meter.sample(601.0)
    assert found is not None
    assert found.joules == 100.0


def test_time_that_goes_back_gives_no_figure(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 0)
    meter = Rapl(tmp_path)
    meter.sample(10.0)
    zone(tmp_path, "0", "package-0", 100 * JOULE)
    assert meter.sample(9.0) is None
    assert meter.sample(9.0) is None


def test_energy_for_administrators_only(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", "")  # what an unreadable file reads as
    with pytest.raises(CannotCount, match=r"root only .* 5\.10") as caught:
        Rapl(tmp_path)
    assert "cpuchat counters unit" in caught.value.how


def test_energy_that_becomes_unreadable(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 1)
    meter = Rapl(tmp_path)
    (tmp_path / ZONES / "intel-rapl:0/energy_uj").unlink()
    with pytest.raises(OSError, match="no longer be read"):
        meter.sample(1.0)


def test_no_rapl(tmp_path: Path) -> None:
    with pytest.raises(CannotCount) as caught:
        Rapl(tmp_path)
    assert "modprobe" in caught.value.how


def energy_pmu(root: Path, unit: str = "Joules") -> None:
    scale = "2.3283064365386962890625e-10"
    events = {"energy-pkg": "event=0x02", "energy-pkg.scale": scale, "energy-pkg.unit": unit}
    pmu(root, "power", 8, "0,32", {"event": "config:0-7"}, events)


def test_energy_through_perf(tmp_path: Path) -> None:
    energy_pmu(tmp_path)
    machine = Simulated()
    meter = PackageEnergy(tmp_path, machine.calls)
    assert [(e.type, e.config, e.cpu) for e in machine.events.values()] == [(8, 2, 0), (8, 2, 32)]
    assert meter.sample(1.0) is None
    machine.run(1, lambda _: 100 * 2**32)
    found = meter.sample(2.0)
    assert found is not None
    assert (found.watts, found.joules, found.source) == (200.0, 200.0, "rapl (perf)")
    machine.run(1, lambda _: 9000 * 2**32)  # nonsense
    assert meter.sample(3.0) is None
    machine.run(1, lambda _: 50 * 2**32)
    found = meter.sample(4.0)
    assert found is not None
    assert (found.watts, found.joules) == (100.0, 300.0)
    meter.close()
    assert machine.open_events == []


def test_energy_through_perf_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotCount, match="no energy counter"):
        PackageEnergy(tmp_path, Simulated().calls)
    energy_pmu(tmp_path)
    machine = Simulated(refuse=lambda event: refused(errno.EACCES) if event.cpu else None)
    with pytest.raises(CannotCount):
        PackageEnergy(tmp_path, machine.calls)
    assert machine.open_events == []
    energy_pmu(tmp_path, unit="BTU")
    with pytest.raises(CannotCount, match="BTU"):
        PackageEnergy(tmp_path, Simulated().calls)


def test_hsmp_tells_milliwatts_of_each_socket(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    write(root, {"dev/hsmp": ""})
    machine = Simulated(answers={(4, 0): 180_500, (4, 1): 99_500})
    meter = HsmpPower(read_topology(root), root, machine.calls)
    first = meter.sample(10.0)
    assert first is not None
    assert (first.watts, first.joules, first.source) == (280.0, 0.0, "hsmp")
    second = meter.sample(10.5)
    assert second is not None
    assert second.joules == 140.0
    backwards = meter.sample(3.0)
    assert backwards is not None
    assert backwards.joules == 140.0
    machine.answers[4, 1] = refused(errno.ETIMEDOUT)
    assert [meter.sample(11.0 + n) for n in range(3)] == [None] * 3
    with pytest.raises(OSError):
        meter.sample(15.0)
    meter.close()
    assert machine.closed_files == [7]
    assert {sent[0] for sent in machine.sent} == {4}


def test_hsmp_that_does_not_know_power(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "epyc-9354")
    write(root, {"dev/hsmp": ""})
    machine = Simulated()
    with pytest.raises(CannotCount, match="firmware"):
        HsmpPower(read_topology(root), root, machine.calls)
    assert machine.closed_files == [7]


def test_the_sensor_tells_microwatts(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    topology = read_topology(root)
    with pytest.raises(CannotCount, match="no such sensor"):
        HsmpSensor(topology, root)
    files = {f"sys/devices/platform/AMDI0097:0{n}/hwmon/hwmon{n + 3}/power1_input": str(100_250_000) for n in range(2)}
    write(root, files)
    meter = HsmpSensor(topology, root)
    found = meter.sample(1.0)
    assert found is not None
    assert found.watts == 200.5
    for file in files:
        (root / file).write_text("?\n")
    assert meter.sample(2.0) is None
    meter.close()


def test_other_architectures_are_not_told_to_load_intels_module(tmp_path: Path) -> None:
    with pytest.raises(CannotCount, match="x86 CPUs only") as caught:
        Rapl(tmp_path, Topology(architecture="aarch64"))
    assert caught.value.how == ""
    zone(tmp_path, "0", "package-0", 5)
    Rapl(tmp_path, Topology(architecture="x86_64"))


def test_a_container_that_hides_it_is_not_told_to_load_a_module(tmp_path: Path) -> None:
    folder = tmp_path / ZONES
    folder.mkdir(parents=True)
    (folder / "intel-rapl:0").symlink_to("../../devices/virtual/powercap/intel-rapl/intel-rapl:0")
    with pytest.raises(CannotCount, match="not visible") as caught:
        Rapl(tmp_path)
    assert caught.value.how == ""


def test_sensors_of_the_platform_driver(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    topology = read_topology(root)
    write(root, {"sys/devices/platform/amd_hsmp/hwmon/hwmon3/power1_input": "100000000"})
    with pytest.raises(CannotCount, match="1 of 2 sockets"):
        HsmpSensor(topology, root)
    write(root, {"sys/devices/platform/amd_hsmp/hwmon/hwmon4/power1_input": "60000000"})
    meter = HsmpSensor(topology, root)
    found = meter.sample(1.0)
    assert found is not None and found.watts == 160
    write(root, {"sys/devices/platform/amd_hsmp/hwmon/hwmon4/power1_input": "-60000000"})
    assert meter.sample(2.0) is None
