"""Reads /proc/PID/numa_maps: which mapping of a process has how many pages on which NUMA node.

Documentation/filesystems/proc.rst; written by show_numa_map in fs/proc/task_mmu.c. Spaces, tabs, newlines and "=" in
file names are octal escapes; pages in huge page files are counted in huge pages, all others in plain ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_NODE = re.compile(r"N([0-9]{1,5})=([0-9]{1,15})")
_ESCAPE = re.compile(r"\\(011|012|040|075)")
_FLAGS = frozenset({"heap", "stack", "huge"})


@dataclass(frozen=True, slots=True)
class Region:
    """One mapping. `policy` in the kernel's words ("default", "interleave:0-1", "weighted interleave:0-1"), `file`
    "" without one, `nodes` bytes by node, `page_size` in bytes."""

    policy: str
    file: str
    nodes: Mapping[int, int]
    page_size: int

    @property
    def bytes(self) -> int:
        return sum(self.nodes.values())


def parse_numa_maps(lines: Iterable[str]) -> Iterator[Region]:
    """Yield the regions with resident pages; malformed fields are skipped."""
    for line in lines:
        nodes: dict[int, int] = {}
        policy: list[str] = []
        file, page_kb = "", 4
        for word in line.split()[1:]:
            name, equals, value = word.partition("=")
            if found := _NODE.fullmatch(word):
                nodes[int(found[1])] = int(found[2])
            elif name == "file":
                file = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), value).removesuffix(" (deleted)")
            elif name == "kernelpagesize_kB":
                page_kb = int(value) if value.isdecimal() else page_kb
            elif word not in _FLAGS and (not equals or ":" in value):  # with "=": "bind=static:0"
                policy.append(word)
        if nodes:
            page = page_kb << 10
            yield Region(" ".join(policy), file, {node: count * page for node, count in nodes.items()}, page)


def shares(nodes: Mapping[int, int]) -> dict[int, float]:
    """Return each node's part of the whole, by ascending node; empty for nothing."""
    total = sum(nodes.values())
    return {node: nodes[node] / total for node in sorted(nodes)} if total else {}


def share_words(nodes: Mapping[int, int]) -> str:
    """ "N0 51 % · N1 49 %"; "" for nothing."""
    return " · ".join(f"N{node} {part * 100:.0f} %" for node, part in shares(nodes).items())
