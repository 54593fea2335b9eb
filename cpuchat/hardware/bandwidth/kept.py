"""Measured bandwidths of this machine, kept in one file so that they are measured once.

An entry belongs to a machine (its CPU, its microcode, its memory, its NUMA nodes) and to the cores that were measured.
A file that is damaged, or written by another version, counts as empty.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import msgspec

from cpuchat import paths
from cpuchat.hardware.cgroups import read_text
from cpuchat.hardware.lists import format_cpu_list, parse_cpu_list
from cpuchat.hardware.memory import meminfo

ROOT = Path("/")
_FORMAT: Final = 1
_MOST_ENTRIES: Final = 64


class Saved(msgspec.Struct):
    """The file. Keys are those of `key`; what a value looks like is the business of who wrote it."""

    format: int = _FORMAT
    entries: dict[str, Any] = msgspec.field(default_factory=dict)


def key(kind: str, cpus: Collection[int], words: str = "", root: Path = ROOT) -> str:
    """What a figure of `kind` belongs to: this machine, these CPUs and, where there are nodes, a memory policy."""
    nodes = read_text(root / "sys/devices/system/node/online")
    if len(parse_cpu_list(nodes)) < 2:
        words = ""
    parts = [kind, format_cpu_list(cpus), words, *_machine(root), f"nodes {nodes}"]
    return " | ".join(part.replace("|", "/") for part in parts)


def _machine(root: Path) -> tuple[str, ...]:
    import platform

    model = microcode = ""
    with contextlib.suppress(OSError), (root / "proc/cpuinfo").open("rb") as file:
        # The first CPU's entry is enough, and hundreds of them take the kernel a while to write.
        for line in file.read(4096).decode("ascii", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and not model:
                model = value.strip()
            elif name.strip() == "microcode" and not microcode:
                microcode = value.strip()
    # Firmware and kernel take a little more or less of it from one start to the next.
    gigabytes = round(meminfo(root).get("MemTotal", 0) / 1e9)
    return model or platform.processor() or platform.machine(), microcode, f"{gigabytes} GB"


def load(name: str) -> Any:
    """The entry called `name`, as JSON gives it; None when there is none."""
    return _read().entries.get(name)


def store(name: str, value: Any) -> None:
    """Keep `value` (what msgspec can write) under `name`; the newest entries stay. No room on the disk: not kept."""
    saved = _read()
    saved.entries.pop(name, None)
    saved.entries[name] = value
    saved.entries = dict(list(saved.entries.items())[-_MOST_ENTRIES:])
    folder = _file().parent
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(saved), indent=1))
            Path(temporary).replace(_file())
        finally:
            Path(temporary).unlink(missing_ok=True)  # there only when that went wrong


def _read() -> Saved:
    try:
        saved = msgspec.json.decode(_file().read_bytes(), type=Saved)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return Saved()
    return saved if saved.format == _FORMAT else Saved()


def _file() -> Path:
    return paths.cache_dir() / "bandwidth.json"
