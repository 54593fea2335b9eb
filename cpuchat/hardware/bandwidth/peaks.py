"""Keeps the read bandwidth of the cores in use, the denominator of utilization; measured once per set of cores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Final

import msgspec

from cpuchat.errors import CpuchatError, Interrupted
from cpuchat.hardware.bandwidth import cache as bandwidth_cache
from cpuchat.hardware.bandwidth.measuring import ROOT, Cancelled, ReadBandwidth, measure
from cpuchat.hardware.numa.mempolicy import current
from cpuchat.telemetry.machine import Peak
from cpuchat.telemetry.units import plural

RETRY_SECONDS: Final = 3600.0
"""Seconds for which a disturbed measurement counts before it is repeated: on a machine that is always busy, every load
would wait for another one.
"""


def peak_of(
    cpus: Sequence[int],
    memory_words: str = "",
    *,
    retry_after: float = RETRY_SECONDS,
    cancelled: Cancelled | None = None,
    failed: Callable[[str], None] | None = None,
    root: Path = ROOT,
) -> Peak | None:
    """Return the read bandwidth of these logical CPUs together; measured (2 seconds) unless it is cached.

    What was measured while other programs ran is measured again, and the better of both counts.

    Args:
        retry_after: but not within so many seconds.
        memory_words: the memory policy to measure under, resolved ("local", "interleave:0-1"); "" is the one that this
            process runs under.
        cancelled: asked every 50 ms; True ends the measurement.
        failed: gets the reason in words when there is no figure.

    Returns:
        None when it was cancelled, or could not be measured.
    """
    known = _saved(cpus, memory_words, root)
    if known is not None and not _is_due(known, retry_after):
        return _peak(known)
    try:
        measured = measure(cpus, memory=memory_words, cancelled=cancelled, root=root)
    except Interrupted:
        return None
    except CpuchatError as error:
        if failed is not None:
            failed(str(error))
        return None
    return remember(measured, memory_words, root=root)


def known_peak(
    cpus: Sequence[int], memory_words: str = "", *, root: Path = ROOT, disturbed: bool = True
) -> Peak | None:
    """Return the cached measurement of these CPUs; None when there is none.

    `disturbed` False: also None when other programs ran meanwhile.
    """
    known = _saved(cpus, memory_words, root)
    return None if known is None or (known.disturbed and not disturbed) else _peak(known)


def should_measure(cpus: Sequence[int], memory_words: str = "", *, root: Path = ROOT) -> bool:
    """Return whether these CPUs were never measured, or only while disturbed and over an hour ago."""
    known = _saved(cpus, memory_words, root)
    return known is None or _is_due(known)


def _is_due(known: ReadBandwidth, retry_after: float = RETRY_SECONDS) -> bool:
    return known.disturbed and not 0 <= time() - known.made < retry_after


def _saved(cpus: Sequence[int], memory_words: str, root: Path) -> ReadBandwidth | None:
    saved = bandwidth_cache.load(_key(cpus, memory_words, root))
    with contextlib.suppress(msgspec.ValidationError):
        measured = msgspec.convert(saved, ReadBandwidth)
        if measured.bytes_per_s > 0 and measured.cpus == tuple(sorted(set(cpus))):
            return measured
    return None


def remember(measured: ReadBandwidth, memory_words: str = "", *, root: Path = ROOT) -> Peak:
    """Save a measurement as the peak of its CPUs, unless it was disturbed and more was measured before."""
    known = _saved(measured.cpus, memory_words, root) if measured.disturbed else None
    if known is not None and known.bytes_per_s > measured.bytes_per_s:
        if not known.disturbed:
            return _peak(known)
        measured = known
    bandwidth_cache.store(_key(measured.cpus, memory_words, root), replace(measured, made=time()))
    return _peak(measured)


def _key(cpus: Sequence[int], memory_words: str, root: Path) -> str:
    policy = None if memory_words else current()
    return bandwidth_cache.key("peak", cpus, policy.words if policy else memory_words, root)


def _peak(measured: ReadBandwidth) -> Peak:
    source = f"measured, {plural(len(measured.cpus), 'core')}"
    return Peak(measured.bytes_per_s, f"{source}, other programs ran" if measured.disturbed else source, measured.cpus)
