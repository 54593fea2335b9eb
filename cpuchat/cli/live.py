"""Shows a running benchmark on stderr: a table that grows, and below it how far it is."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from cpuchat.cli.terminal import TerminalOutput
from cpuchat.present.table import table
from cpuchat.telemetry import units

if TYPE_CHECKING:
    from cpuchat.bench.run import Bench

_SECONDS = 0.1


class LiveTable:
    """On a terminal it is drawn in place; elsewhere each measurement that counts is one line."""

    def __init__(self) -> None:
        self._terminal = TerminalOutput()
        self._told = 0
        self._next = 0.0

    def show(self, running: Bench) -> None:
        """Draw what there is now; called as often as one likes."""
        if not self._terminal.moves:
            self._tell(running)
        elif time.monotonic() >= self._next:
            self._draw(running)
            self._next = time.monotonic() + _SECONDS

    def _tell(self, running: Bench) -> None:
        for one in running.measured[self._told :]:
            self._told += 1
            self._terminal.note(
                f"{self._told} of {len(running.cells) * running.rounds}: {one.cell.words}: "
                f"{units.rate(one.sample.rate)} tok/s"
            )

    def _draw(self, running: Bench) -> None:
        from cpuchat.present import bench as words

        progress, room = running.progress, shutil.get_terminal_size().lines - 2
        results = running.report().results if running.measured else ()
        lines = table([words.HEADINGS, *words.rows(results)], right=words.RIGHT) if results else []
        if len(lines) > room:
            lines = [lines[0], *lines[len(lines) - room + 1 :]] if room > 1 else []
        lines.append(words.progress_bar(progress.done, progress.total, progress.seconds_left, progress.what))
        self._terminal.status("\n".join(lines))

    def clear(self) -> None:
        """Remove what was drawn."""
        self._terminal.clear_progress()
