"""What the system says of a running process: its memory, huge and locked pages, and the CPUs of its threads."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from time import monotonic

from cpuchat.base.text import clean_line
from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.sysfs import ROOT, read_text

_KILOBYTES = re.compile(r"^(\w+): +([0-9]{1,15}) kB$", re.MULTILINE)
_TICKS, _TICKS_PER_SECOND = (11, 12), os.sysconf("SC_CLK_TCK")  # of these fields utime and stime
_LITTLE = 0.2  # of a core: less delays nobody
_KERNEL_THREADS = 2  # the parent of all of them, which nobody can stop
_PROCESSOR = 36  # of the fields of /proc/PID/stat behind the name (proc_pid_stat(5): field 39)


@dataclass(frozen=True, slots=True)
class ThreadCpus:
    """A thread: the CPUs that it may run on, and the one that it ran on last (None: not known)."""

    allowed: tuple[int, ...]
    ran_on: int | None


@dataclass(frozen=True, slots=True)
class MemoryPages:
    """Bytes of a process: `resident`, of which `huge_anonymous` and `huge_file` are in huge pages, and `locked`."""

    resident: int = 0
    huge_anonymous: int = 0
    huge_file: int = 0
    locked: int = 0


def thread_cpus(pid: int, thread_ids: Iterable[int], root: Path = ROOT) -> tuple[ThreadCpus, ...]:
    """Return where these threads of a process run; those that no longer exist are left out."""
    found: list[ThreadCpus] = []
    for thread_id in thread_ids:
        folder = root / f"proc/{pid}/task/{thread_id}"
        status = dict(line.split(":", 1) for line in read_text(folder / "status").splitlines() if ":" in line)
        if allowed := status.get("Cpus_allowed_list", ""):
            fields = read_text(folder / "stat").rpartition(")")[2].split()
            ran_on = fields[_PROCESSOR] if len(fields) > _PROCESSOR else ""
            found.append(ThreadCpus(parse_cpu_list(allowed), int(ran_on) if ran_on.isdecimal() else None))
    return tuple(found)


class BusyPrograms:
    """Follows which programs compute, and how much of each CPU this program and its children have. `root` replaces `/`
    in tests."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._last: dict[int, int] = {}  # ticks of CPU time of each process
        self._own: dict[str, int] = {}  # of each thread of this program
        self._at = monotonic()

    def names(self, taken: float = 0.0) -> tuple[str, ...]:
        """Return the two other programs that computed most since the last call, with their busiest process: `cc1 (PID
        71 and 3 more)`; none at first. Behind them `other programs`, where all that are named had less than half of the
        `taken` cores."""
        last, before, self._at = self._last, self._at, monotonic()
        ticks = max(self._at - before, 0.01) * _TICKS_PER_SECOND
        spent, found = dict[str, Counter[int]](), self._processes()
        own, chats = _family(found), _family(found, *(pid for pid, (name, _, _) in found.items() if name == "cpuchat"))
        for pid, (name, parent, used) in found.items():
            more = used - last.get(pid, 0)  # one that is new has begun since then
            if last and more > 0 and pid not in own and parent != _KERNEL_THREADS:
                spent.setdefault("another cpuchat" if pid in chats else name, Counter())[pid] = more
        self._last = {pid: used for pid, (_, _, used) in found.items()}
        words, named = list[str](), 0.0
        for name, of in sorted(spent.items(), key=lambda one: -one[1].total())[:2]:
            more = f" and {len(of) - 1} more" if len(of) > 1 else ""
            if of.total() >= _LITTLE * ticks:
                named += of.total() / ticks
                words.append(f"{name} (PID {max(of, key=of.__getitem__)}{more})")
        return (*words, "other programs") if words and named < taken / 2 else tuple(words)

    def own_ticks(self) -> Counter[int]:
        """Return the ticks of CPU time that threads of this program and its children spent since the last call, by the
        logical CPU that each ran on last; none at first."""
        last, self._own, found = self._own, {}, Counter[int]()
        for pid in _family(self._processes()):
            for file in (self._root / f"proc/{pid}/task").glob("[0-9]*/stat"):
                fields = read_text(file).rpartition(")")[2].split()
                if len(fields) > _PROCESSOR:
                    self._own[file.parent.name] = used = sum(int(fields[n]) for n in _TICKS)
                    found[int(fields[_PROCESSOR])] += used - last.get(file.parent.name, 0)
        return found if last else Counter()

    def _processes(self) -> dict[int, tuple[str, int, int]]:
        """Return the name, the parent and the ticks of CPU time of each process."""
        found: dict[int, tuple[str, int, int]] = {}
        for file in (self._root / "proc").glob("[0-9]*/stat"):
            head, _, rest = read_text(file).rpartition(")")
            if len(fields := rest.split()) > _TICKS[1]:
                used = sum(int(fields[n]) for n in _TICKS)
                found[int(file.parent.name)] = clean_line(head.partition("(")[2]), int(fields[1]), used
        return found


def _family(processes: Mapping[int, tuple[str, int, int]], *roots: int) -> set[int]:
    """Return these processes and all of their descendants; without any, this one and its own."""
    found, size = {*roots} or {os.getpid()}, 0
    while len(found) > size:
        size = len(found)
        found |= {pid for pid, (_, parent, _) in processes.items() if parent in found}
    return found


def memory_pages(pid: int, root: Path = ROOT) -> MemoryPages | None:
    """Return the pages of a process; None where the kernel does not tell (/proc/PID/smaps_rollup)."""
    sizes = {name: int(kb) << 10 for name, kb in _KILOBYTES.findall(read_text(root / f"proc/{pid}/smaps_rollup"))}
    if not sizes:
        return None
    huge_files = sizes.get("FilePmdMapped", 0) + sizes.get("ShmemPmdMapped", 0)
    return MemoryPages(sizes.get("Rss", 0), sizes.get("AnonHugePages", 0), huge_files, sizes.get("Locked", 0))


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident bytes: `private` is the process's own, `shared` mapped files (model weights) and shared memory."""

    private: int
    shared: int


def process_memory(pid: int) -> ProcessMemory | None:
    """Return the resident memory of `pid`; None when there is no such process or it may not be looked at. Linux:
    /proc/PID/statm (proc(5)). Elsewhere: what psutil can tell."""
    if sys.platform != "linux":
        import psutil  # not needed on Linux, and slow to import: the app asks on the thread of its screens

        try:
            info = psutil.Process(pid).memory_info()
        except psutil.Error:
            return None
        return ProcessMemory(private=info.rss, shared=0)  # which of it is shared, only Linux tells
    pages = read_text(Path(f"/proc/{pid}/statm")).split()
    resident, shared = map(int, pages[1:3] or (0, 0))
    if not resident:  # a zombie has no memory left
        return None
    return ProcessMemory(private=(resident - shared) * PAGESIZE, shared=shared * PAGESIZE)
