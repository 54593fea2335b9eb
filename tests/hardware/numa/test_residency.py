"""Tests where memory is: recorded machines with two nodes, simulated policies, and real files and processes here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuchat.hardware.numa import residency
from cpuchat.hardware.numa.mempolicy import Policy
from cpuchat.hardware.numa.residency import (
    evict,
    mapped_by,
    parse_numa_maps,
    prepare_file,
    read_residency,
    reader_cpus,
    resident_bytes,
    resident_nodes,
)
from cpuchat.hardware.topology import Topology, read_topology
from tests.hardware.trees import make_tree, write

MIB = 1 << 20
SIZE = 8 * MIB

# Recorded on Linux 6.12 in QEMU with two nodes and weights 3:1: a heap, 72 MiB that asked for huge pages,
# 8 MiB of huge page files, 8 MiB, a deleted file called "/odd name=<tab>1.gguf", the C library, and the stack.
RECORDED = r"""
562d89e6b000 weighted interleave:0-1 heap anon=822 dirty=822 active=0 N0=616 N1=206 kernelpagesize_kB=4
7f30d0200000 weighted interleave:0-1 anon=18432 dirty=18432 active=0 N0=13824 N1=4608 kernelpagesize_kB=4
7f30d4a00000 weighted interleave:0-1 file=/anon_hugepage\040(deleted) huge anon=4 dirty=4 N0=3 N1=1 kernelpagesize_kB=2048
7f30d5200000 weighted interleave:0-1 anon=2048 dirty=2048 active=0 N0=1536 N1=512 kernelpagesize_kB=4
7f30d5a08000 weighted interleave:0-1 file=/odd\040name\075\0111.gguf\040(deleted) dirty=256 active=0 N0=193 N1=63 kernelpagesize_kB=4
7f30d67e7000 weighted interleave:0-1 file=/lib/x86_64-linux-gnu/libc.so.6 mapped=239 mapmax=2 active=0 N0=239 kernelpagesize_kB=4
7f30d6990000 weighted interleave:0-1 file=/lib/x86_64-linux-gnu/libc.so.6 anon=4 dirty=4 active=0 N0=3 N1=1 kernelpagesize_kB=4
7ffcabdc9000 weighted interleave:0-1 stack anon=14 dirty=14 active=0 N0=12 N1=2 kernelpagesize_kB=4
"""  # noqa: E501

# Maps a file whole and 80 MiB of its own, says so, and waits for the end of its input.
HOLDER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    weights = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
buffer = mmap.mmap(-1, 80 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def weights() -> Iterator[Path]:
    """Return a file on a disk (files of temporary folders in memory can't be dropped), in the page cache."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="cpuchat-test-") as folder:
        path = Path(folder) / "some weights=1.gguf"
        path.write_bytes(os.urandom(SIZE))
        yield path


@pytest.fixture
def holder(weights: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that maps the file."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(weights)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def dual(tmp_path: Path, numa_maps: str = "") -> tuple[Path, Topology]:
    """Two sockets, one node each; this process's numa_maps there."""
    root = make_tree(tmp_path, "2x-epyc-7543")
    write(root, {"proc/self/numa_maps": numa_maps})
    return root, read_topology(root, allowed=range(128))


def line(path: Path, policy: str = "default", **pages: int) -> str:
    """A line of numa_maps about a mapped file: `N0=…`, `N1=…`."""
    name = str(path).replace(" ", r"\040").replace("=", r"\075")
    counts = " ".join(f"{node}={count}" for node, count in pages.items())
    return f"7f0000000000 {policy} file={name} mapped={sum(pages.values())} active=0 {counts} kernelpagesize_kB=4"


def stayed(path: Path) -> bool:
    """Whether the file is still in memory: the kernel may take some of its pages where memory is short."""
    return resident_bytes(path) > SIZE // 2


def test_a_recorded_process(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/7/numa_maps": RECORDED.strip()})
    odd = Path("/odd name=\t1.gguf")
    regions = list(parse_numa_maps(RECORDED.splitlines()))
    assert {region.policy for region in regions} == {"weighted interleave:0-1"}
    assert [region.file for region in regions][2:5] == ["/anon_hugepage", "", str(odd)]
    found = read_residency(7, [odd], root)
    assert found.weights == {0: 193 * 4096, 1: 63 * 4096}
    assert found.large == {0: 54 * MIB, 1: 18 * MIB}
    assert found.policy == "weighted interleave:0-1"
    assert found.words() == "weights: 75 % on node 0 · 25 % on node 1 · large buffers: 75 % on node 0 · 25 % on node 1"


def test_a_real_process(weights: Path, holder: subprocess.Popen[bytes]) -> None:
    found = read_residency(holder.pid, [weights])
    assert sum(found.weights.values()) == SIZE
    assert 80 * MIB <= sum(found.large.values()) < 90 * MIB
    assert found.policy
    assert " % on node " in found.words()
    holder.stdin.close()
    holder.wait()
    assert read_residency(holder.pid) is None


def test_a_file_is_in_memory_until_it_is_dropped(weights: Path) -> None:
    """It was just written: its pages are not on the disk yet either."""
    assert stayed(weights)
    assert sum(resident_nodes(weights).values()) == pytest.approx(resident_bytes(weights), rel=0.001)
    assert evict(weights)
    assert resident_bytes(weights) == 0
    assert resident_nodes(weights) == {}
    assert len(weights.read_bytes()) == SIZE
    assert stayed(weights)


def test_a_file_that_a_program_maps_stays(weights: Path, holder: subprocess.Popen[bytes]) -> None:
    assert not evict(weights)
    assert resident_bytes(weights) == SIZE
    assert [name.rpartition(" ")[2] for name in mapped_by(weights)] == [f"({holder.pid})"]


def test_of_other_users_files_the_kernel_does_not_tell(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency.os, "geteuid", lambda: weights.stat().st_uid + 1)
    monkeypatch.setattr(residency.os, "access", lambda path, mode: False)
    assert resident_bytes(weights) is None
    assert not evict(weights)


# Where the file's pages are, as sampled on a simulated machine: (policy, pages on node 0 and 1, moved).
CASES = [
    ("interleave:0-1", 1000, 1000, False), ("interleave:0-1", 2000, 0, True), ("interleave:0-1", 1300, 700, True),
    ("bind:0", 2000, 0, False), ("bind:0", 0, 2000, True), ("preferred:1", 1000, 1000, True), ("local", 2000, 0, False),
]  # fmt: skip


@pytest.mark.parametrize(("words", "on_0", "on_1", "moved"), CASES)
def test_a_file_that_an_earlier_program_placed(
    tmp_path: Path, weights: Path, words: str, on_0: int, on_1: int, moved: bool
) -> None:
    root, topology = dual(tmp_path, line(weights, N0=on_0, N1=on_1))
    mode, _, nodes = words.partition(":")
    policy = Policy(mode, tuple(range(int(nodes[0]), int(nodes[-1]) + 1)) if nodes else ())  # pyright: ignore
    note = prepare_file(weights, policy, topology, root)
    assert bool(note) == moved
    assert stayed(weights) != moved
    if moved:
        assert resident_bytes(weights) == 0
        assert f"which does not match {words}: reading it from disk again" in note


def test_a_placed_file_that_is_in_use_is_named(tmp_path: Path, weights: Path, holder: subprocess.Popen[bytes]) -> None:
    root, topology = dual(tmp_path, line(weights, N0=2000))
    (root / f"proc/{holder.pid}").symlink_to(f"/proc/{holder.pid}")
    note = prepare_file(weights, Policy("interleave", (0, 1)), topology, root)
    assert note.startswith("The file was in memory, 100 % on node 0, and cannot be moved: ")
    assert f"({holder.pid}) uses it" in note
    assert resident_bytes(weights) == SIZE


def test_what_is_not_worth_reading_again(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, topology = dual(tmp_path, line(weights, N0=2000))
    one_node = read_topology(make_tree(tmp_path, "epyc-9654"), allowed=range(8))
    assert prepare_file(weights, Policy("interleave"), one_node, root) == ""
    # A little of it in memory:
    evict(weights)
    assert prepare_file(weights, Policy("interleave"), topology, root) == ""
    weights.read_bytes()
    # A preferred node that is smaller than the file:
    small = [f"Node {node} MemTotal:       4096 kB" for node in (0, 1)]
    for node, text in enumerate(small):
        write(root, {f"sys/devices/system/node/node{node}/meminfo": text})
    topology = read_topology(root, allowed=range(128))
    assert prepare_file(weights, Policy("preferred", (1,)), topology, root) == ""
    assert stayed(weights)
    # And what is not known is said.
    monkeypatch.setattr(residency, "resident_nodes", lambda path, root: None)
    assert "is not known" in prepare_file(weights, Policy("bind", (1,)), topology, root)


def test_one_reader_per_node_only_where_no_policy_is_in_force(tmp_path: Path) -> None:
    _, topology = dual(tmp_path, "")
    node_0, node_1 = (node.cpus for node in topology.nodes)
    refused = "Setting a memory policy is not permitted here"
    cpus = (node_0[0], node_0[1], node_1[0])
    each = [(node_0[0], node_0[1]), (node_1[0],)]
    assert reader_cpus(topology, cpus, Policy("local"), refused) == each
    assert reader_cpus(topology, cpus, None, "") == each
    for mode in ("interleave", "local"):
        assert reader_cpus(topology, cpus, Policy(mode), "") == [()]
    assert reader_cpus(topology, node_0[:2], None, "") == [()]
    assert reader_cpus(topology, (), None, "") == [()]
