"""Caches the measured bandwidths of this machine, so that they are measured once.

An entry belongs to a machine (its CPU, its microcode, its memory, its NUMA nodes) and to the cores that were measured.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from cpuchat import paths
from cpuchat.files import JsonCache
from cpuchat.hardware.cgroups import read_text
from cpuchat.hardware.lists import format_cpu_list, parse_cpu_list
from cpuchat.hardware.memory import meminfo
from cpuchat.hardware.sysfs import cpuinfo_values

ROOT = Path("/")


def key(kind: str, cpus: Collection[int], words: str = "", root: Path = ROOT) -> str:
    """Return the cache key of a `kind` of figure: this machine, these CPUs and, with several nodes, a memory policy."""
    nodes = read_text(root / "sys/devices/system/node/online")
    if len(parse_cpu_list(nodes)) < 2:
        words = ""
    parts = [kind, format_cpu_list(cpus), words, *_machine(root), f"nodes {nodes}"]
    return " | ".join(part.replace("|", "/") for part in parts)


def _machine(root: Path) -> tuple[str, ...]:
    values = cpuinfo_values(root)
    # Firmware and kernel take a little more or less of it from one start to the next.
    gigabytes = round(meminfo(root).get("MemTotal", 0) / 1e9)
    model = values.get("model name") or platform.processor() or platform.machine()
    return model, values.get("microcode", ""), f"{gigabytes} GB"


def load(name: str) -> Any:
    """Return the decoded JSON entry `name`; None if there is none."""
    return _cache().read().get(name)


def store(name: str, value: Any) -> None:
    """Cache `value` (whatever msgspec can encode) under `name`."""
    _cache().put(name, value)


def _cache() -> JsonCache[Any]:
    return JsonCache(paths.bandwidth_file(), cast(type[Any], Any), version=1, max_entries=64)
