"""Shows a running benchmark on stderr: a table that grows, and below it how far it is."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING

from cpuchat.cli.output import cleaned
from cpuchat.cli.terminal import Terminal
from cpuchat.present.table import table
from cpuchat.telemetry import units

if TYPE_CHECKING:
    from cpuchat.bench.run import Bench

_SECONDS = 0.1


class LiveTable:
    """On a terminal it is drawn in place; elsewhere each measurement that counts is one line."""

    def __init__(self) -> None:
        self._terminal = Terminal()
        self._out = cleaned(sys.stderr)
        self._drawn = 0  # lines
        self._said: set[tuple[int, int]] | None = None
        self._note = ""
        self._next = 0.0

    def show(self, running: Bench) -> None:
        """Draw what there is now; called as often as one likes."""
        if running.progress.note != self._note:
            self._note = running.progress.note
            self.clear()
            self._terminal.note(self._note)
        if not self._terminal.moves:
            self._tell(running)
        elif time.monotonic() >= self._next:
            self._draw(running)
            self._next = time.monotonic() + _SECONDS

    def _tell(self, running: Bench) -> None:
        known = running.journal.measurements
        if self._said is None:
            self._said = set(known)  # of an earlier run
        for key, line in known.items():
            if key not in self._said:
                self._said.add(key)
                cell = running.cells[line.cell]
                noisy = ", noisy" if line.noisy else ""
                self._terminal.note(
                    f"{len(known)} of {len(running.cells) * running.rounds}: {cell.words}: "
                    f"{units.rate(line.sample.rate)} tok/s{noisy}"
                )

    def _draw(self, running: Bench) -> None:
        from cpuchat.bench.results import report_of
        from cpuchat.present import bench as words

        size, progress = shutil.get_terminal_size(), running.progress
        found = report_of(running.journal, running.failed)
        lines = table([words.HEADINGS, *words.rows(found.results)], right=words.RIGHT) if found.results else []
        room = size.lines - 2
        if len(lines) > room:
            lines = [lines[0], *lines[len(lines) - room + 1 :]] if room > 1 else []
        lines.append(words.progress_bar(progress.done, progress.total, progress.seconds_left, progress.what))
        self._erase()
        self._write("\n".join(line[: size.columns - 1] for line in lines))
        self._drawn = len(lines)

    def clear(self) -> None:
        """Remove what was drawn."""
        self._erase()
        self._write("")

    def _erase(self) -> None:
        if self._drawn:
            up = f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else ""
            self._write(f"\r{up}\x1b[J", raw=True)
            self._drawn = 0

    def _write(self, text: str, *, raw: bool = False) -> None:
        if self._out is None:
            return
        try:
            (self._out.write_raw if raw else self._out.write)(text)
            self._out.flush()
        except OSError:
            self._out = None  # nobody listens
