"""Keeps the measurements so far in a file of JSON lines, so that a killed benchmark resumes.

A line is appended for each measurement that counts; a torn last line is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cpuchat.bench.environment import Environment
from cpuchat.bench.matrix import Cell
from cpuchat.bench.sample import Sample
from cpuchat.errors import UsageError
from cpuchat.files import append_line, delete_oldest, read_small
from cpuchat.model_info import ModelInfo
from cpuchat.paths import shown

_KEPT_FILES = 20


class Header(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First line: what is measured, and where."""

    key: str
    cells: tuple[Cell, ...]
    rounds: int
    environment: Environment


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model of a setup was loaded; `cell` is the first of that setup."""

    cell: int
    model: ModelInfo


class Measurement(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A sample of a cell (by its number) in a round; `noisy`: the machine was not steady."""

    cell: int
    round: int
    sample: Sample
    noisy: bool = False


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Last line: all that could be measured was."""


Line = Header | Loaded | Measurement | Finished


def benchmark_key(cells: Sequence[Cell], rounds: int, prompts: object, environment: Environment) -> str:
    """Identify a benchmark: what is measured with which engine, files and settings on which CPU."""
    digest = hashlib.blake2b(digest_size=12)
    parts = (cells, rounds, prompts, environment.build, environment.cpu, environment.files, environment.settings)
    digest.update(msgspec.json.encode(parts))
    return digest.hexdigest()


class Journal:
    """The lines of one benchmark. Nothing is written before `begin`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.header: Header | None = None
        self.loaded: dict[int, ModelInfo] = {}
        self.measurements: dict[tuple[int, int], Measurement] = {}
        self.finished = False
        self._read()

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(Line)
        with contextlib.suppress(OSError):
            for number, data in enumerate(read_small(self.file, 64 << 20).splitlines()):
                try:
                    line = decoder.decode(data)
                except (ValueError, RecursionError):
                    if not number:
                        return
                    continue
                self._add(line)

    def _add(self, line: Line) -> None:
        match line:
            case Header():
                self.header = line
            case Loaded():
                self.loaded[line.cell] = line.model
            case Measurement():
                self.measurements[line.cell, line.round] = line
            case Finished():
                self.finished = True

    def begin(self, header: Header) -> None:
        """Start anew. Raises UsageError where the file cannot be written."""
        self.loaded, self.measurements, self.finished = {}, {}, False
        self.header = header
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.file.write_bytes(msgspec.json.encode(header) + b"\n")
        except OSError as error:
            raise UsageError(f"Cannot write {shown(self.file)}: {error.strerror}.", "Choose another file.") from None

    def append(self, line: Line) -> None:
        """Write a line. On a full disk the benchmark continues, but cannot be resumed."""
        self._add(line)
        with contextlib.suppress(OSError):
            append_line(self.file, msgspec.json.encode(line))


def cached_journal(folder: Path, key: str) -> Path:
    """Return the file of a benchmark that was given no name; old ones are removed."""
    with contextlib.suppress(OSError):
        delete_oldest(folder, "*.jsonl", _KEPT_FILES - 1)
    return folder / f"{key}.jsonl"
