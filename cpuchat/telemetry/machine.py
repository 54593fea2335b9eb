"""Readings of the machine while it computes: plain values, filled in by `hardware`.

Resident memory of another process.

Figures of a server that answers: what it was waited for, and its load. Definitions: docs/figures.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the collector of counters has the standard library and nothing else
    from cpuchat.protocol.messages import ServerLoad
    from cpuchat.protocol.model_info import ModelInfo
    from cpuchat.protocol.timings import Timings

Scope = Literal["machine", "socket", "process"]


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak read bandwidth in bytes per second: the denominator of utilization.

    `source` is how it is known in a few words ("measured, 2 cores"), `cpus` the logical CPUs that were measured.
    """

    bytes_per_s: float
    source: str
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Memory traffic since the last sample, in bytes per second.

    `source` names the counter ("hsmp", "umc", "mbm", ...), `scope` what its figure covers: the whole machine, the
    sockets in use, or the inference process alone. `read` and `write` are None where the counter knows only their
    sum, `total`. `per_l3` is the share of each L3 group, in the order of the topology; () where not known.
    """

    total: float
    source: str
    scope: Scope
    read: float | None = None
    write: float | None = None
    per_l3: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Power:
    """`watts` since the last sample; `joules` since counting began; `source` as of `Bandwidth`.

    Whole packages, without memory modules and power supply.
    """

    watts: float
    joules: float
    source: str


@dataclass(frozen=True, slots=True)
class MachineSample:
    """One sample of the counters. None is "unknown", and `why_missing` says why and how to get it."""

    bandwidth: Bandwidth | None = None
    power: Power | None = None
    no_bandwidth: str = ""
    no_power: str = ""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident bytes. `private` is the process's own; `shared` is mapped files (model weights, shared by every
    process that maps the same file) and shared memory."""

    private: int
    shared: int


def process_memory(pid: int) -> ProcessMemory | None:
    """Resident memory of `pid`; None when there is no such process or it may not be looked at.

    Linux: /proc/PID/statm (proc(5)). Elsewhere: what psutil can tell.
    """
    if sys.platform != "linux":
        import psutil  # not needed on Linux, and slow to import

        try:
            info = psutil.Process(pid).memory_info()
        except psutil.Error:
            return None
        shared = getattr(info, "shared", 0)
        return ProcessMemory(private=info.rss - shared, shared=shared)
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return None
    if not resident:  # a zombie has no memory left
        return None
    return ProcessMemory(private=(resident - shared) * PAGESIZE, shared=shared * PAGESIZE)


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """The figures of a server; None is "unknown", and `why_missing` says why.

    `network_s` and `queue_s` are parts of the time to the first token. `running` requests are answered now, this one
    among them, and `waiting` ones wait; `kv_used` of its KV cache is in use (0-1). All hold other users' requests.
    """

    name: str
    network_s: float | None = None
    queue_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    unreported: tuple[tuple[str, str], ...] = ()

    def why_unreported(self, figure: str) -> str:
        """Return why the server does not report a figure; "" for one that it reports."""
        return dict(self.unreported).get(figure, "")

    def why_missing(self, field: str) -> str:
        """Return why that field is None, in a few words; "" when it is not None.

        Raises:
            AttributeError: no such field.
        """
        if getattr(self, field) is not None:
            return ""
        return self.why_unreported(field) or "at the end"


class ServerMeter:
    """Keeps the newest figures of the server of the loaded model."""

    def __init__(self) -> None:
        self._model: ModelInfo | None = None
        self._reported: set[str] = set()
        self._load: ServerLoad | None = None
        self.reset()

    def reset(self) -> None:
        """Begin another answer."""
        self._timings: Timings | None = None

    def model(self, model: ModelInfo | None) -> None:
        """Set the loaded model, or None."""
        self._model, self._load, self._reported = model, None, set()
        self.reset()

    def load(self, load: ServerLoad) -> None:
        """Record the load of the server."""
        self._load = load

    def finish(self, timings: Timings) -> None:
        """End the answer."""
        self._timings = timings
        values = {"queue_s": timings.queue_ms, "prefill_tok_s": timings.prompt_per_second}
        self._reported |= {name for name, value in values.items() if value is not None}
        if timings.reused_known and timings.prompt_n:
            self._reported.add("prefill_cached")

    @property
    def is_used(self) -> bool:
        """Return whether the model is on a server."""
        return self._model is not None and bool(self._model.server)

    def reused(self, cache_n: int) -> int | None:
        """Return the reused tokens of the prompt, `cache_n` by its progress; None while the server does not tell."""
        if self._timings is not None:
            return cache_n if not self.is_used else self._timings.cache_n if self._timings.reused_known else None
        hidden = self._model is not None and self._model.why_unreported("prefill_cached")
        return None if hidden else cache_n

    @property
    def approximate(self) -> bool:
        """Return whether the tokens are counted by the parts that came."""
        if self._timings is not None:
            return self._timings.approximate
        return self._model is not None and bool(self._model.why_unreported("tokens"))

    def figures(self) -> ServerFigures | None:
        """Return the current figures; None for a model on this machine."""
        model, load, timings = self._model, self._load, self._timings
        if model is None or not model.server:
            return None
        return ServerFigures(
            name=model.server,
            network_s=_seconds(timings.network_ms if timings is not None else None),
            queue_s=_seconds(timings.queue_ms if timings is not None else None),
            running=load.running if load is not None else None,
            waiting=load.waiting if load is not None else None,
            kv_used=load.kv_used if load is not None else None,
            unreported=tuple(pair for pair in model.unreported if pair[0] not in self._reported),
        )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
