"""Tests what memory modules could deliver: SMBIOS tables as boards write them and broken ones, EDAC, the
table of CPUs."""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuchat.hardware.bandwidth.memory_modules import (
    Module,
    Theoretical,
    channel_of,
    edac_channels,
    parse_modules,
    read_modules,
    theoretical,
    usual_memory,
)
from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.trees import make_tree, write

GIB = 1 << 30


def structure(kind: int, fields: bytes, *strings: str) -> bytes:
    """Return a structure of an SMBIOS table (DSP0134 §6.1): header, fields, strings, two zero bytes at the end."""
    text = b"".join(string.encode() + b"\0" for string in strings) or b"\0"
    return struct.pack("<BBH", kind, 4 + len(fields), 0x1100) + fields + text + b"\0"


def device(
    locator: str,
    bank: str = "",
    *,
    size: int = 0x7FFF,
    speed: int = 4800,
    configured: int = 4800,
    width: int = 64,
    extended: tuple[int, int] = (0, 0),
    length: int = 0x5C,
) -> bytes:
    """Return a memory device (type 17). `size` is the word at 0x0C; 0x7FFF means the 64 GiB of the extended field."""
    fields = bytearray(0x5C - 4)

    def put(offset: int, form: str, value: int) -> None:
        struct.pack_into(form, fields, offset - 4, value)

    put(0x08, "<H", width + 16)
    put(0x0A, "<H", width)
    put(0x0C, "<H", size)
    put(0x0E, "<B", 9)
    put(0x10, "<B", 1)
    put(0x11, "<B", 2 if bank else 0)
    put(0x12, "<B", 0x22)
    put(0x15, "<H", speed)
    put(0x1C, "<I", 64 << 10)
    put(0x20, "<H", configured)
    put(0x54, "<I", extended[0])
    put(0x58, "<I", extended[1])
    return structure(17, bytes(fields[: length - 4]), locator, *([bank] if bank else []))


BIOS = structure(0, bytes(20), "American Megatrends", "2.4")
END = structure(127, b"")


def table(*devices: bytes) -> bytes:
    return BIOS + b"".join(devices) + END


def genoa(populated: str = "ABCDEFGHIJKL") -> bytes:
    """Return twelve channels with one slot each, named as in AMD's reference firmware."""
    return table(*(
        device("DIMM 0", f"P0 CHANNEL {letter}", size=0x7FFF if letter in populated else 0) for letter in "ABCDEFGHIJKL"
    ))  # fmt: skip


@lru_cache
def topology_of(tree: str) -> Topology:
    with TemporaryDirectory() as folder:
        return read_topology(make_tree(Path(folder), tree))


def machine(tmp_path: Path, dmi: bytes | None = None, tree: str = "epyc-9354") -> tuple[Topology, Path]:
    """Return the topology of a machine, and a root with the files about its memory."""
    if dmi is not None:
        file = tmp_path / "sys/firmware/dmi/tables/DMI"
        file.parent.mkdir(parents=True)
        file.write_bytes(dmi)
    return topology_of(tree), tmp_path


def found_in(tmp_path: Path, dmi: bytes | None = None, tree: str = "epyc-9354") -> Theoretical:
    found = theoretical(*machine(tmp_path, dmi, tree))
    assert found is not None
    return found


# SMBIOS


def test_a_table_of_modules() -> None:
    modules = parse_modules(genoa("AB"))
    assert modules == [
        Module("DIMM 0", "P0 CHANNEL A", 64 * GIB, 4800, 64),
        Module("DIMM 0", "P0 CHANNEL B", 64 * GIB, 4800, 64),
    ]


@pytest.mark.parametrize(
    ("fields", "size", "speed"),
    [
        ({"size": 0x2000}, 8 * GIB, 4800),  # 8192 MB
        ({"size": 0x8000 | 512}, 512 << 10, 4800),  # kilobytes
        ({"size": 0xFFFF}, 0, 4800),  # a module of unknown size
        ({"configured": 4400, "speed": 4800}, 64 * GIB, 4400),
        ({"configured": 0, "speed": 4800}, 64 * GIB, 4800),
        ({"configured": 0xFFFF, "extended": (0, 70_000 >> 1)}, 64 * GIB, 35_000),
        ({"configured": 0, "speed": 0xFFFF, "extended": (8800, 0)}, 64 * GIB, 8800),
        ({"configured": 0, "speed": 0}, 64 * GIB, 0),
        ({"configured": 3200, "length": 0x22}, 64 * GIB, 3200),  # SMBIOS 2.7 ends there
        ({"speed": 1600, "length": 0x17}, None, 1600),  # SMBIOS 2.3 knows no extended size
    ],
)
def test_sizes_and_speeds(fields: dict[str, int], size: int | None, speed: int) -> None:
    [module] = parse_modules(table(device("A1", **fields)))  # type: ignore[arg-type]
    assert module.speed_mt == speed
    assert size is None or module.size == size


def test_labels_are_cleaned_and_missing_ones_are_empty() -> None:
    [module] = parse_modules(table(device("\x1b[31mDIMM\n0")))
    assert module.bank == ""
    assert "\x1b" not in module.locator and "\n" not in module.locator
    wild = bytearray(device("A1"))
    wild[0x10] = 9  # the ninth of one string
    assert parse_modules(table(bytes(wild)))[0].locator == ""


def test_what_is_no_table() -> None:
    assert parse_modules(b"") == []
    assert parse_modules(END + device("A1")) == []
    assert parse_modules(b"\x11\x03\0\0" + bytes(64)) == []  # shorter than its own header
    assert parse_modules(device("A1")[:-2]) == []  # the strings don't end
    assert parse_modules(device("A1")[:40]) == []
    assert read_modules(Path("/no/such/table")) == []


def test_a_cut_table_keeps_what_is_whole() -> None:
    whole = BIOS + device("A1") + device("B1")
    assert [module.locator for module in parse_modules(whole[:-10])] == ["A1"]


@settings(deadline=None)
@given(st.data())
def test_no_mutated_table_breaks_anything(data: st.DataObject) -> None:
    content = bytearray(genoa("ABC"))
    for _ in range(data.draw(st.integers(1, 12))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    for module in parse_modules(bytes(content[:cut])):
        assert module.speed_mt == 0 or 100 <= module.speed_mt <= 50_000
        assert 0 <= module.width_bits <= 1024
        assert 0 <= module.size < 1 << 52
        assert isinstance(channel_of(module), str)


@settings(deadline=None)
@given(st.binary(max_size=4096))
def test_no_bytes_break_anything(content: bytes) -> None:
    assert all(module.locator.isprintable() for module in parse_modules(content))


# Channels


@pytest.mark.parametrize(
    "labels",
    [
        [("DIMM 0", "P0 CHANNEL A"), ("DIMM 0", "P0 CHANNEL B")],
        [("DIMM 0", "P0 CHANNEL A"), ("DIMM 0", "P1 CHANNEL A")],
        [("ChannelA-DIMM0", "BANK 0"), ("ChannelB-DIMM0", "BANK 2")],
        [("Controller0-ChannelA-DIMM0", "BANK 0"), ("Controller1-ChannelA-DIMM0", "BANK 0")],
        [("DIMM_A1", ""), ("DIMM_B1", "")],
        [("P1-DIMMA1", "P0_Node0_Channel0_Dimm0"), ("P1-DIMMB1", "P0_Node0_Channel1_Dimm0")],
        [("CPU1_DIMM_A1", "NODE 0"), ("CPU2_DIMM_A1", "NODE 1")],
        [("A1", "Not Specified"), ("B1", "Not Specified")],
        [("DIMM_P0_A0", "BANK 0"), ("DIMM_P0_B0", "BANK 1")],
        [("DIMM_P0_A0", "BANK 0"), ("DIMM_P1_A0", "BANK 1")],
        [("DIMM 1", "P0 CHANNEL 1"), ("DIMM 1", "P0 CHANNEL 10")],
    ],
)
def test_labels_of_two_channels(labels: list[tuple[str, str]]) -> None:
    one, other = (channel_of(Module(locator, bank, GIB, 4800, 64)) for locator, bank in labels)
    assert one and other and one != other


@pytest.mark.parametrize(
    "labels",
    [
        [("DIMM 0", "P0 CHANNEL A"), ("DIMM 1", "P0 CHANNEL A")],
        [("ChannelA-DIMM0", "BANK 0"), ("ChannelA-DIMM1", "BANK 1")],
        [("DIMM_A1", ""), ("DIMM_A2", "")],
        [("P1-DIMMA1", "P0_Node0_Channel0_Dimm0"), ("P1-DIMMA2", "P0_Node0_Channel0_Dimm1")],
        [("A1", ""), ("A9", "")],
    ],
)
def test_labels_of_one_channel(labels: list[tuple[str, str]]) -> None:
    one, other = (channel_of(Module(locator, bank, GIB, 4800, 64)) for locator, bank in labels)
    assert one == other != ""


@pytest.mark.parametrize("locator", ["PROC 1 DIMM 3", "DIMM0", "", "Top - on board"])
def test_labels_that_tell_no_channel(locator: str) -> None:
    assert channel_of(Module(locator, "BANK 0", GIB, 4800, 64)) == ""


# The most that can be transferred


def test_all_channels_by_the_table(tmp_path: Path) -> None:
    found = found_in(tmp_path, genoa())
    assert found.bytes_per_s == 12 * 4800e6 * 8
    assert (found.channels, found.possible, found.speed_mt, found.assumed) == (12, 12, 4800, False)
    assert found.source == "12 channels × 4800 MT/s (SMBIOS)"


def test_empty_channels_count_for_nothing(tmp_path: Path) -> None:
    found = found_in(tmp_path, genoa("AG"))
    assert found.bytes_per_s == 2 * 4800e6 * 8
    assert (found.channels, found.possible) == (2, 12)


def test_one_channel_is_no_plural(tmp_path: Path) -> None:
    assert found_in(tmp_path, genoa("A")).source == "1 channel × 4800 MT/s (SMBIOS)"


def test_two_modules_on_a_channel_share_it_at_the_slower_ones_speed(tmp_path: Path) -> None:
    found = found_in(tmp_path, table(
        device("DIMM_A1", configured=4400), device("DIMM_A2", configured=4000), device("DIMM_B1", configured=4400)
    ))  # fmt: skip
    assert found.bytes_per_s == (4000e6 + 4400e6) * 8
    assert (found.channels, found.speed_mt) == (2, 4000)


def test_there_are_no_more_channels_than_the_cpu_has(tmp_path: Path) -> None:
    modules = (device(f"PROC 1 DIMM {n}") for n in range(1, 25))  # labels that tell nothing
    assert found_in(tmp_path, table(*modules)).channels == 12


def test_two_sockets(tmp_path: Path) -> None:
    modules = (
        device("DIMM 0", f"P{socket} CHANNEL {letter}", configured=3200) for socket in (0, 1) for letter in "ABCDEFGH"
    )
    found = found_in(tmp_path, table(*modules), "2x-epyc-7543")
    assert (found.channels, found.possible) == (16, 16)
    assert found.bytes_per_s == pytest.approx(409.6e9)


def test_modules_of_unknown_speed_leave_it_to_the_cpu(tmp_path: Path) -> None:
    found = found_in(tmp_path, table(device("DIMM_A1", speed=0, configured=0)))
    assert found.assumed
    assert found.bytes_per_s == pytest.approx(460.8e9)
    assert found.source == "assumed: 12 channels × 4800 MT/s, the maximum of EPYC 9354"
    assert found.note == ""


def test_without_the_table_the_channels_come_from_edac(tmp_path: Path) -> None:
    topology, root = machine(tmp_path)
    edac = "sys/devices/system/edac/mc"
    files: dict[str, str] = {}
    for n in range(12):
        files |= {f"{edac}/mc0/dimm{n}/dimm_location": f"csrow {n % 2} channel {n // 2}"}
        files |= {f"{edac}/mc0/dimm{n}/size": "0" if n >= 8 else "32768"}
    files |= {f"{edac}/mc1/rank0/dimm_location": "channel 0 slot 0", f"{edac}/mc1/rank0/size": "16384"}
    files |= {f"{edac}/mc1/rank1/dimm_location": "?", f"{edac}/mcX/dimm0/size": "1", f"{edac}/mc1/dimm1/size": "none"}
    write(root, files)
    assert len(edac_channels(root)) == 5
    found = theoretical(topology, root)
    assert found is not None
    assert (found.channels, found.possible, found.assumed) == (5, 12, True)
    assert found.bytes_per_s == 5 * 4800e6 * 8
    assert found.source == "5 channels populated (EDAC) × 4800 MT/s, assumed for EPYC 9354"


def test_without_anything_it_is_assumed_and_says_how_to_know(tmp_path: Path) -> None:
    found = found_in(tmp_path, tree="2x-epyc-7543")
    assert found.bytes_per_s == pytest.approx(409.6e9)
    assert found.assumed and "dmidecode" in found.note


@pytest.mark.parametrize("tree", ["vm", "vm-without-caches", "garbage", "hybrid-desktop"])
def test_what_is_not_known_is_none(tmp_path: Path, tree: str) -> None:
    assert theoretical(*machine(tmp_path, tree=tree)) is None


def test_a_virtual_machine_whose_table_knows_speeds_is_believed(tmp_path: Path) -> None:
    assert found_in(tmp_path, table(device("DIMM 0", speed=2400, configured=2400)), "vm").speed_mt == 2400


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [
        ("AMD EPYC 9654 96-Core Processor", 460.8),
        ("AMD EPYC 9754 128-Core Processor", 460.8),
        ("AMD EPYC 9684X 96-Core Processor", 460.8),
        ("AMD EPYC 9575F 64-Core Processor", 576.0),
        ("AMD EPYC 8534P 64-Core Processor", 230.4),
        ("AMD EPYC 7543 32-Core Processor", 204.8),
        ("AMD EPYC 73F3 16-Core Processor", 204.8),
        ("AMD EPYC 7H12 64-Core Processor", 204.8),
        ("AMD EPYC 7601 32-Core Processor", 170.624),
        ("AMD Ryzen Threadripper PRO 7995WX 96-Cores", 332.8),
        ("AMD Ryzen 9 7950X3D 16-Core Processor", 83.2),
        ("AMD Ryzen 7 9800X3D 8-Core Processor", 89.6),
        ("Intel(R) Xeon(R) Gold 6430", 307.2),
        ("Intel(R) Xeon(R) Platinum 8592+", 358.4),
        ("Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz", 204.8),
        ("Intel(R) Xeon(R) 6980P", 614.4),
    ],
)
def test_usual_memory(model: str, gigabytes: float) -> None:
    channels, speed = usual_memory(Topology(model=model)) or (0, 0)
    assert channels * speed * 8 / 1000 == pytest.approx(gigabytes)


@pytest.mark.parametrize("model", ["", "AMD EPYC", "AMD EPYC-Rome Processor", "AMD Ryzen 7 7840U", "Apple M2"])
def test_no_usual_memory(model: str) -> None:
    assert usual_memory(Topology(model=model)) is None
