"""Runs inside the virtual machine of numa.py, as its only program: places memory in every way, prints where it went.

Every line of result starts with MARK and is JSON. Called with an argument it is the program that is placed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.numa.mempolicy import choose_policy, in_effect, launch_command, parse_policy
from cpuchat.hardware.numa.residency import evict, prepare_file, read_residency, resident_bytes, resident_nodes
from cpuchat.hardware.topology import read_topology

MARK = "@@ "
FILE = Path("/weights.gguf")
WEIGHTS = Path("/sys/kernel/mm/mempolicy/weighted_interleave")
_HUGETLB = 0x40000  # MAP_HUGETLB
_POWER_OFF = 0x4321FEDC  # LINUX_REBOOT_CMD_POWER_OFF

EVEN = {0: 0.5, 1: 0.5}
ZERO = {0: 1.0, 1: 0.0}
ONE = {0: 0.0, 1: 1.0}
PLACED = {"interleave": EVEN, "interleave:0-1": EVEN, "bind:0": ZERO, "bind:1": ONE, "preferred:1": ONE, "auto": EVEN}


def say(**result: object) -> None:
    print(MARK + json.dumps(result), flush=True)


def shares(nodes: Mapping[int, int]) -> dict[int, float]:
    total = sum(nodes.values())
    return {node: nodes.get(node, 0) / total if total else 0.0 for node in (0, 1)}


def child(how: str) -> None:
    """What a worker does with the weights: map the file whole, or read it into memory of its own."""
    with FILE.open("rb") as file:
        size = FILE.stat().st_size
        if how == "mapped":
            memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        else:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            file.readinto(memory)
    placement = read_residency("self", [FILE])
    assert placement is not None
    words, refused = in_effect()
    nodes = placement.weights if how == "mapped" else placement.large
    result = {"shares": shares(nodes), "bytes": sum(nodes.values()), "words": placement.words(), "policy": words}
    print(json.dumps({**result, "kernel_policy": placement.policy, "refused": refused}), flush=True)
    if how == "mapped":
        sys.stdin.read()
    memory.close()


@contextlib.contextmanager
def started(words: str, how: str, cpus: str = "") -> Iterator[dict[str, object]]:
    """A child under the policy, alive in the body; what it said."""
    command = launch_command(words, [sys.executable, __file__, how])

    def pin() -> None:
        if cpus:
            os.sched_setaffinity(0, parse_cpu_list(cpus))

    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=pin)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait()


def case(words: str, wanted: Mapping[int, float], how: str = "mapped", cpus: str = "") -> None:
    """One policy, the file not in memory before."""
    evicted = evict(FILE)
    with started(words, how, cpus) as said:
        pass
    asked = f"{words}, on CPU {cpus}" if cpus else words
    cached = shares(resident_nodes(FILE) or {})
    say(case=asked, load=how, wanted=wanted, evicted=evicted, cached=cached, **said)


def refusals() -> None:
    for words in ("bind:2", "bind:0-2"):
        with started(words, "mapped") as said:
            say(refusal=words, policy=said["policy"], why=said["refused"])


def earlier_copy() -> None:
    """A file that another program read before: it stays where it is, unless it is prepared."""
    topology, policy = read_topology(), parse_policy("interleave:0-1")
    for prepared in (False, True):
        evict(FILE)
        with started("bind:0", "mapped"):
            pass
        note = prepare_file(FILE, policy, topology) if prepared else ""
        with started(policy.words, "mapped") as said:
            name = "read on node 0 before, prepared" if prepared else "read on node 0 before"
            say(case=f"{policy.words}, {name}", load="mapped", wanted=EVEN if prepared else ZERO, note=note, **said)
    note = prepare_file(FILE, policy, topology)
    say(again="interleave:0-1", note=note)
    evict(FILE)
    with started("bind:0", "mapped"):
        note = prepare_file(FILE, policy, topology)
        say(held="bind:0", note=note, resident=resident_bytes(FILE))


def sample() -> None:
    """All kinds of regions of one process, in the kernel's own words: the tests of the reader hold them."""
    odd = Path("/odd name=\t1.gguf")
    odd.write_bytes(bytes(1 << 20))
    with odd.open("rb") as file:
        memories = [mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)]
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memories += [mmap.mmap(-1, 8 << 20, flags=private | mmap.MAP_POPULATE | extra) for extra in (0, _HUGETLB)]
    thp = mmap.mmap(-1, 72 << 20, flags=private)
    thp.madvise(mmap.MADV_HUGEPAGE)
    for place in range(0, len(thp), mmap.PAGESIZE):
        thp[place] = 1
    odd.unlink()
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    wanted = ("odd", "huge", "heap", "stack", "libc", "anon=2048", "anon=18432")
    placement = read_residency("self", [odd])
    assert placement is not None
    say(sample=[line for line in lines if any(word in line for word in wanted)], huge=placement.huge)
    for memory in (*memories, thp):
        memory.close()


def main() -> None:
    topology = read_topology()
    nodes = [(node.number, node.cpus, node.memory, node.distances) for node in topology.nodes]
    chosen = {str(cpus): choose_policy(topology, "auto", cpus)[0].words for cpus in ((), (0,), (1,))}
    say(nodes=nodes, allowed_nodes=topology.allowed_nodes, auto=chosen, kernel=os.uname().release)
    for how in ("mapped", "read"):
        for words, wanted in PLACED.items():
            case(words, wanted, how)
        for cpu, wanted in ((0, ZERO), (1, ONE)):
            case("local", wanted, how, str(cpu))
    if WEIGHTS.is_dir():
        for node, weight in ((0, 3), (1, 1)):
            (WEIGHTS / f"node{node}").write_text(str(weight))
        for how in ("mapped", "read"):
            case("weighted:0-1", {0: 0.75, 1: 0.25}, how)
    refusals()
    Path("/proc/sys/vm/nr_hugepages").write_text("8")
    words = "weighted:0-1" if WEIGHTS.is_dir() else "interleave"
    subprocess.run(launch_command(words, [sys.executable, __file__, "sample"]), check=True)
    earlier_copy()
    say(finished=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sample() if sys.argv[1] == "sample" else child(sys.argv[1])
    else:
        try:
            main()
        except BaseException as error:
            say(error=repr(error))
            raise
        finally:
            os.sync()
            ctypes.CDLL(None).reboot(_POWER_OFF)
