"""Simulated machines: the sysfs and proc files of servers and desktops that are not here, below a temporary root.

`make_tree(tmp_path, "epyc-9354")` writes one and returns its root; `NAMES` are all of them. How CPUs are numbered,
which L3 groups there are and how large they are is as on the real machines; "VM", "container" and "offline" are the
unpleasant cases.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

originals = Path()
"""A folder that the processes of a run share; set by `tests/conftest.py`."""
GIB = 1 << 30
CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"
_CPU = re.compile(r"cpu\d+")
_ZEN4 = "fpu sse2 avx avx2 fma f16c avx512f avx512bw avx512vl avx512_bf16 avx512_vnni"
_ZEN3 = "fpu sse2 avx avx2 fma f16c"


@dataclass(frozen=True)
class Machine:
    """Sockets of equal L3 groups of equal cores, cut into `nodes` NUMA nodes per socket."""

    model: str
    family: int
    number: int
    l3_per_socket: int
    cores_per_l3: int
    l3_kib: int = 32768
    sockets: int = 1
    nodes: int = 1
    smt: bool = True
    flags: str = _ZEN4
    vendor: str = "AuthenticAMD"
    memory: int = 384 * GIB
    max_khz: int = 3_800_000

    @property
    def n_cores(self) -> int:
        return self.sockets * self.l3_per_socket * self.cores_per_l3

    def siblings(self, core: int) -> tuple[int, ...]:
        """Return CPU numbers in EPYC order: first threads of all cores, then their siblings."""
        return (core, core + self.n_cores) if self.smt else (core,)


_7543 = Machine("AMD EPYC 7543 32-Core Processor", 25, 1, 8, 4, sockets=2, flags=_ZEN3, memory=512 * GIB)
_MACHINES = {
    "epyc-9334": Machine("AMD EPYC 9334 32-Core Processor", 25, 17, 4, 8),
    "epyc-9354": Machine("AMD EPYC 9354 32-Core Processor", 25, 17, 8, 4),
    "epyc-9354p-nps4": Machine("AMD EPYC 9354P 32-Core Processor", 25, 17, 8, 4, nodes=4),
    "epyc-9654": Machine("AMD EPYC 9654 96-Core Processor", 25, 17, 12, 8, memory=768 * GIB),
    "epyc-9754": Machine("AMD EPYC 9754 128-Core Processor", 25, 160, 16, 8, l3_kib=16384, memory=768 * GIB),
    "2x-epyc-7543": _7543,
    "xeon-6430": Machine(
        "Intel(R) Xeon(R) Gold 6430", 6, 143, 1, 32, l3_kib=61440, vendor="GenuineIntel", flags="fpu avx2 avx512f"
    ),
}  # fmt: skip


def write(root: Path, files: dict[str, str]) -> Path:
    """Write text files below `root`, each with a newline at its end."""
    made: set[str] = set()
    for name, text in files.items():
        folder = f"{root}/{name.rpartition('/')[0]}"
        if folder not in made:
            made.add(folder)
            _unlink_cpu(root, name)
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - thousands of files: pathlib takes twice as long
        with open(f"{root}/{name}", "w") as file:  # noqa: PTH123
            file.write(text + "\n")
    return root


def _unlink_cpu(root: Path, name: str) -> None:
    """Give a tree its own copy of the CPU's folder that the file `name` is in, if it is a link (see `make_tree`)."""
    inside = name.removeprefix(f"{CPUS}/").split("/")[0]
    cpu = root / CPUS / inside
    if name.startswith(f"{CPUS}/cpu") and cpu.is_symlink():
        original = cpu.readlink()
        cpu.unlink()
        shutil.copytree(original, cpu)


def numbers(values: tuple[int, ...] | range | list[int]) -> str:
    return ",".join(map(str, values))


def cpu_files(cpu: int, package: int, siblings: tuple[int, ...], max_khz: int) -> dict[str, str]:
    base = f"{CPUS}/cpu{cpu}"
    return {
        f"{base}/topology/physical_package_id": str(package),
        f"{base}/topology/core_cpus_list": numbers(siblings),
        f"{base}/topology/thread_siblings_list": numbers(siblings),
        f"{base}/cpufreq/scaling_driver": "amd-pstate-epp",
        f"{base}/cpufreq/scaling_governor": "performance",
        f"{base}/cpufreq/energy_performance_preference": "performance",
        f"{base}/cpufreq/cpuinfo_max_freq": str(max_khz),
        f"{base}/cpufreq/scaling_cur_freq": str(max_khz - 50_000 * (cpu % 8)),
    }


def cache_files(cpu: int, level: int, kib: int, shared: tuple[int, ...], id: int) -> dict[str, str]:
    base = f"{CPUS}/cpu{cpu}/cache/index{level}"
    return {
        f"{base}/level": str(level),
        f"{base}/size": f"{kib}K",
        f"{base}/shared_cpu_list": numbers(shared),
        f"{base}/id": str(id),
    }


def node_files(number: int, cpus: tuple[int, ...], memory: int) -> dict[str, str]:
    base = f"{NODES}/node{number}"
    total, free = memory // 1024, memory * 3 // 4 // 1024
    return {
        f"{base}/cpulist": numbers(cpus),
        f"{base}/meminfo": f"Node {number} MemTotal:       {total} kB\nNode {number} MemFree:        {free} kB",
    }


def cpuinfo(model: str, vendor: str, family: int, number: int, flags: str, cpus: tuple[int, ...] | range) -> str:
    return "\n\n".join(
        f"processor\t: {cpu}\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {number}\n"
        f"model name\t: {model}\nstepping\t: 1\nmicrocode\t: 0xa101148\ncpu MHz\t\t: 3500.000\nflags\t\t: {flags}"
        for cpu in cpus
    )


def meminfo(memory: int) -> str:
    kib = memory // 1024
    free = f"MemFree:        {kib // 2} kB\nMemAvailable:   {kib * 3 // 4} kB"
    return f"MemTotal:       {kib} kB\n{free}\nHugePages_Total: 0"


def status(cpus: tuple[int, ...] | range, mems: tuple[int, ...] | range = (0,)) -> str:
    return f"Name:\tpython3\nCpus_allowed_list:\t{numbers(cpus)}\nMems_allowed_list:\t{numbers(mems)}"


def system_files(memory: int, cpus: tuple[int, ...] | range, mems: tuple[int, ...] | range = (0,)) -> dict[str, str]:
    """Return the files of every tree besides CPUs, caches and nodes."""
    return {
        "proc/meminfo": meminfo(memory),
        "proc/self/status": status(cpus, mems),
        "proc/self/cgroup": "0::/",
        "proc/sys/kernel/numa_balancing": "0",
        "proc/sys/kernel/perf_event_paranoid": "2",
        "sys/fs/cgroup/cgroup.controllers": "cpuset cpu memory",
        f"{CPUS}/online": numbers(cpus),
        f"{CPUS}/cpufreq/boost": "1",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    }


def server(root: Path, machine: Machine) -> Path:
    """Write the tree of a server."""
    n = machine.n_cores
    all_cpus = range(n * (2 if machine.smt else 1))
    n_nodes = machine.sockets * machine.nodes
    files = system_files(machine.memory, all_cpus, range(n_nodes))
    files["proc/cpuinfo"] = cpuinfo(
        machine.model, machine.vendor, machine.family, machine.number, machine.flags, all_cpus
    )
    for core in range(n):
        group = core // machine.cores_per_l3
        package = group // machine.l3_per_socket
        first = group * machine.cores_per_l3
        own = machine.siblings(core)
        sharing = tuple(sorted(c for k in range(first, first + machine.cores_per_l3) for c in machine.siblings(k)))
        for cpu in own:
            files |= cpu_files(cpu, package, own, machine.max_khz)
            files |= cache_files(cpu, 2, 1024, own, id=core)
            files |= cache_files(cpu, 3, machine.l3_kib, sharing, id=group)
    files[f"{NODES}/online"] = files[f"{NODES}/has_cpu"] = files[f"{NODES}/has_memory"] = numbers(range(n_nodes))
    per_node = n // n_nodes
    for node in range(n_nodes):
        cores = range(node * per_node, (node + 1) * per_node)
        cpus = tuple(sorted(c for core in cores for c in machine.siblings(core)))
        files |= node_files(node, cpus, machine.memory // n_nodes)
        socket = node // machine.nodes
        files[f"{NODES}/node{node}/distance"] = " ".join(
            "10" if to == node else "12" if to // machine.nodes == socket else "32" for to in range(n_nodes)
        )
    return write(root, files)


def hybrid_desktop(root: Path) -> Path:
    """Write a Core i7-12700K: eight cores with two threads each, four efficient ones; one L3 for all."""
    cpus = range(20)
    files = system_files(32 * GIB, cpus)
    files["proc/cpuinfo"] = cpuinfo(
        "12th Gen Intel(R) Core(TM) i7-12700K", "GenuineIntel", 6, 151, "fpu avx avx2 fma avx_vnni", cpus
    )
    files |= {"sys/devices/cpu_core/cpus": "0-15", "sys/devices/cpu_atom/cpus": "16-19"}
    cores = [(2 * n, 2 * n + 1) for n in range(8)] + [(n,) for n in range(16, 20)]
    for core_id, own in enumerate(cores):
        efficient = len(own) == 1
        for cpu in own:
            files |= cpu_files(cpu, 0, own, 3_800_000 if efficient else 4_900_000)
            files |= cache_files(cpu, 2, 1280, own if not efficient else (16, 17, 18, 19), id=core_id)
            files |= cache_files(cpu, 3, 25600, tuple(cpus), id=0)
    files[f"{NODES}/online"] = "0"
    files |= node_files(0, tuple(cpus), 32 * GIB)
    return write(root, files)


def container(root: Path) -> Path:
    """Write a container on an EPYC 9354: CPUs 8-15 and 40-47 (L3 groups 2 and 3), a quota of 6.5 CPUs, 64 GiB."""
    server(root, _MACHINES["epyc-9354"])
    cpus = (*range(8, 16), *range(40, 48))
    return write(root, {
        "proc/self/status": status(cpus),
        "proc/self/cgroup": "0::/docker/0123456789ab",
        "sys/fs/cgroup/cpu.max": "650000 100000",
        "sys/fs/cgroup/memory.max": str(64 * GIB),
        "sys/fs/cgroup/memory.current": str(2 * GIB),
    })  # fmt: skip


def virtual_machine(root: Path) -> Path:
    """Write eight virtual CPUs of a host that does not number its L3 caches: two of four CPUs each."""
    machine = Machine("AMD EPYC-Rome Processor", 23, 49, 2, 4, l3_kib=16384, smt=False, memory=32 * GIB)
    server(root, replace(machine, flags=f"{_ZEN3} hypervisor"))
    for cpu in range(8):
        (root / f"{CPUS}/cpu{cpu}/cache/index3/id").unlink()
    return write(root, {"sys/class/dmi/id/sys_vendor": "QEMU", "sys/class/dmi/id/product_name": "Standard PC"})


def no_caches(root: Path) -> Path:
    """Write a virtual machine that reports its CPUs but neither caches nor nodes."""
    cpus = range(4)
    files = system_files(16 * GIB, cpus)
    files["proc/cpuinfo"] = cpuinfo(
        "Intel Xeon Processor (Icelake)", "GenuineIntel", 6, 106, "fpu avx2 hypervisor", cpus
    )
    for cpu in cpus:
        files |= cpu_files(cpu, 0, (cpu,), 2_600_000)
    return write(root, files)


def offline(root: Path) -> Path:
    """Write an EPYC 9354 with SMT and the last L3 group (cores 28-31) offline."""
    server(root, _MACHINES["epyc-9354"])
    running = range(28)
    for cpu in range(28, 64):  # the kernel takes these folders away
        for name in ("topology", "cache", "cpufreq"):
            for path in sorted((root / f"{CPUS}/cpu{cpu}/{name}").rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            (root / f"{CPUS}/cpu{cpu}/{name}").rmdir()
        write(root, {f"{CPUS}/cpu{cpu}/online": "0"})
    for cpu in running:
        group = tuple(c for c in running if c // 4 == cpu // 4)
        write(root, {
            f"{CPUS}/cpu{cpu}/topology/core_cpus_list": str(cpu),
            f"{CPUS}/cpu{cpu}/topology/thread_siblings_list": str(cpu),
            f"{CPUS}/cpu{cpu}/cache/index3/shared_cpu_list": numbers(group),
        })  # fmt: skip
    return write(root, {
        f"{CPUS}/online": "0-27", "proc/self/status": status(range(64)), f"{NODES}/node0/cpulist": "0-27",
    })  # fmt: skip


def garbage(root: Path) -> Path:
    """Write unexpected content into every file."""
    files = {
        "proc/cpuinfo": "model name\nflags : \x00\xff\ncpu family : many\nmodel : 1e9\n:::::",
        "proc/meminfo": "MemTotal: lots kB\nMemFree",
        "proc/self/status": "Cpus_allowed_list:\t0-99999999999,x,-,2-\nMems_allowed_list:\t77",
        "proc/self/cgroup": "0\n::::\n0::/../../..",
        "sys/fs/cgroup/cgroup.controllers": "?",
        "sys/fs/cgroup/cpu.max": "9" * 5000 + " 1",
        f"{CPUS}/online": "all of them",
        "sys/devices/cpu_atom/cpus": "?",
        f"{NODES}/online": "0,5",
        f"{NODES}/node0/cpulist": "0-",
        f"{NODES}/node0/meminfo": "Node 0 MemTotal: -5 kB",
        f"{NODES}/nodeX/cpulist": "0-3",
        f"{CPUS}/cpu0/topology/physical_package_id": "9" * 5000,
        f"{CPUS}/cpu0/topology/core_cpus_list": "0-2",
        f"{CPUS}/cpu1/topology/core_cpus_list": "7-3,1",
        f"{CPUS}/cpu2/topology/physical_package_id": "-1",
        f"{CPUS}/cpu0/cache/index0/level": "three",
        f"{CPUS}/cpu0/cache/index3/level": "3",
        f"{CPUS}/cpu0/cache/index3/size": "big",
        f"{CPUS}/cpu0/cache/index3/id": "-0-",
        f"{CPUS}/cpu0/cache/index3/shared_cpu_list": "0-70000",
        f"{CPUS}/cpu0/cache/index9999999999/level": "3",
        f"{CPUS}/cpu0/cpufreq/cpuinfo_max_freq": "fast",
    }
    write(root, files)
    (root / f"{CPUS}/cpu1/cache").write_text("a file where a folder should be\n")
    return root


_OTHERS: dict[str, Callable[[Path], Path]] = {
    "hybrid-desktop": hybrid_desktop,
    "container": container,
    "vm": virtual_machine,
    "vm-without-caches": no_caches,
    "offline": offline,
    "garbage": garbage,
}
NAMES = (*_MACHINES, *_OTHERS)


def _original(name: str) -> Path:
    """Return the tree of `name`, written once for all tests of all processes."""
    root = originals / name
    if not root.exists():
        made = Path(tempfile.mkdtemp(dir=originals))
        _OTHERS[name](made) if name in _OTHERS else server(made, _MACHINES[name])
        with contextlib.suppress(OSError):  # another process was first
            made.rename(root)
    return root


def make_tree(tmp_path: Path, name: str) -> Path:
    """Write the machine called `name` (one of NAMES) below `tmp_path`; returns the root. The folders of its CPUs are
    links to those of other tests: change them with `write` only."""
    root = tmp_path / name
    original = _original(name)

    def linked(folder: str, names: list[str]) -> list[str]:
        """Return the CPUs' folders, which are linked to instead of copied."""
        if folder != f"{original}/{CPUS}":
            return []
        cpus = [name for name in names if _CPU.fullmatch(name)]
        (root / CPUS).mkdir(parents=True)
        for cpu in cpus:
            (root / CPUS / cpu).symlink_to(f"{folder}/{cpu}")
        return cpus

    shutil.copytree(original, root, ignore=linked, dirs_exist_ok=True)
    return root
