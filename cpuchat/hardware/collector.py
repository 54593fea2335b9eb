"""`cpuchat-bwd`: reads the counters that need privileges, and writes their figures to a file that everyone can read.

Runs as a service of its own (hardware.collector_unit), so that neither the app nor its interpreter needs privileges.
It takes no input and opens nothing but counters and its one file. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from cpuchat.hardware.counters.base import ROOT, CounterRefusal
from cpuchat.hardware.counters.collector_file import DEFAULT, content_of, write
from cpuchat.hardware.counters.perf_events import Kernel
from cpuchat.hardware.monitor import Monitor
from cpuchat.hardware.topology import read_topology
from cpuchat.telemetry.machine import MachineSample

SECONDS = 1.0
NOTHING_TO_READ = 3
"""Exit code when no counter opens: an immediate restart would not help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code."""
    parser = argparse.ArgumentParser(prog="cpuchat-bwd", description="Write memory bandwidth and power to a file.")
    parser.add_argument("--output", type=Path, default=DEFAULT, metavar="FILE", help=f"default: {DEFAULT}")
    parser.add_argument("--once", action="store_true", help="print one measurement over a second and exit")
    options = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return collect(options.output, stop, once=options.once)


def collect(
    output: Path, stop: threading.Event, *, once: bool = False, root: Path = ROOT, kernel: Kernel | None = None
) -> int:
    """Measure once a second until `stop` is set; returns the exit code. Leaves no file behind. `once`: print one
    measurement instead. `root`, `kernel`: replaced in tests.
    """
    monitor = Monitor(read_topology(root), None, root, kernel=kernel, collecting=True)
    clock = kernel or Kernel()
    try:
        opened = monitor.sample()
        if not monitor.sources:
            _say("no counter is available on this machine.", monitor.refusals)
            return NOTHING_TO_READ
        if once:
            stop.wait(SECONDS)
            print(json.dumps(content_of(monitor.sample(), clock.wall(), monitor.theoretical)))
            return 0
        if opened.bandwidth is None:  # most counters tell something from their second sample on
            stop.wait(SECONDS)
            opened = monitor.sample()
        return _write_until(stop, monitor, opened, output, clock)
    finally:
        monitor.close()


def _write_until(stop: threading.Event, monitor: Monitor, sample: MachineSample, output: Path, clock: Kernel) -> int:
    due = time.monotonic()
    written = False
    try:
        while not stop.is_set():
            try:
                write(output, sample, clock.wall(), monitor.theoretical)
                written = True
            except OSError as error:
                _say(f"Cannot write {output}: {error.strerror or error}.")
                return 1
            due = max(due + SECONDS, time.monotonic())
            stop.wait(due - time.monotonic())
            sample = monitor.sample()
        return 0
    finally:
        if written:  # else it is none of ours
            with contextlib.suppress(OSError):
                output.unlink(missing_ok=True)


def _say(text: str, refusals: Sequence[CounterRefusal] = ()) -> None:
    print(f"cpuchat-bwd: {text}", *(f"  {one}" for one in refusals), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
