"""Tells a running benchmark on stderr: a line for each measurement that counts, and on a terminal how far it is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cpuchat.cli.terminal import TerminalOutput
from cpuchat.telemetry import units

if TYPE_CHECKING:
    from cpuchat.bench.run import Bench

_SECONDS = 0.1


class LiveBench:
    """`show` is called as often as one likes."""

    def __init__(self) -> None:
        self._terminal = TerminalOutput()
        self._told = 0
        self._next = 0.0

    def show(self, running: Bench) -> None:
        """Tell what is new."""
        from cpuchat.present.bench import progress_bar

        for one in running.measured[self._told :]:
            self._told += 1
            self._terminal.note(
                f"{self._told} of {len(running.cells) * running.rounds}: {one.cell.words}: "
                f"{units.rate(one.sample.rate)} tok/s"
            )
        if time.monotonic() >= self._next:
            progress = running.progress
            self._terminal.status(progress_bar(progress.done, progress.total, progress.seconds_left, progress.what))
            self._next = time.monotonic() + _SECONDS

    def clear(self) -> None:
        """Remove the line of progress."""
        self._terminal.clear_progress()
