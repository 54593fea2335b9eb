"""What a measurement is of: a machine with some of its cores, a build of the engine, models, settings."""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import msgspec

from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.memory import meminfo
from cpuchat.hardware.numa.mempolicy import current
from cpuchat.hardware.sysfs import cpuinfo_values, read_text
from cpuchat.hardware.topology import ROOT
from cpuchat.protocol.options import EngineOptions

_NOT_OF_DECODING: Final = ("n_ctx", "n_batch", "n_ubatch", "mlock", "prefill_share")
"""Options of the engine that do not change how fast this machine decodes."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a measured figure depends on; what it does not depend on is left out.

    `machine` names CPU, microcode, memory and NUMA nodes; `cores` are logical CPUs, rising; `policy` is that of memory,
    in the words of `mempolicy`; `build` identifies the engine's, `kernels` those that compute, `model` the files by
    fingerprints, and `settings` are whatever else matters, by name."""

    machine: str = ""
    cores: tuple[int, ...] = ()
    policy: str = ""
    build: str = ""
    kernels: str = ""
    model: tuple[str, ...] = ()
    settings: dict[str, Any] = {}

    @property
    def key(self) -> str:
        """Return the one text that names it: JSON, the same for equal subjects."""
        return msgspec.json.encode(self, order="sorted").decode()


def on_cores(cpus: Collection[int], policy: str = "", root: Path = ROOT, **more: Any) -> Subject:
    """Return these CPUs of this machine, where several nodes are with a memory policy ("": of this process), and `more`
    fields."""
    nodes = read_text(root / "sys/devices/system/node/online")
    if len(parse_cpu_list(nodes)) < 2:
        policy = ""
    elif not policy and (own := current()) is not None:
        policy = own.words
    values = cpuinfo_values(root)
    name = values.get("model name") or platform.processor() or platform.machine()
    # Firmware and kernel take a little more or less of it from one start to the next.
    gigabytes = round(meminfo(root).get("MemTotal", 0) / 1e9)
    machine = " | ".join((name, values.get("microcode", ""), f"{gigabytes} GB", f"nodes {nodes}"))
    return Subject(machine=machine, cores=tuple(sorted(set(cpus))), policy=policy, **more)


def decode_options(options: EngineOptions) -> dict[str, Any]:
    """Return the options that change how fast a machine decodes, poll and load mode among them."""
    return {name: getattr(options, name) for name in EngineOptions.__struct_fields__ if name not in _NOT_OF_DECODING}
