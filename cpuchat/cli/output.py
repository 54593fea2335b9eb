"""Cleans everything that the command line prints of control sequences.

Into pipes and files too: their content reaches a terminal sooner or later (`| tee`, `cat`).
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from cpuchat.base.errors import CpuchatError, OutputFailed
from cpuchat.base.text import Cleaner, clean, replace_unsafe

_PASSED_ON = ("closed", "encoding", "errors", "fileno", "isatty", "writable")


class OutputClosed(Exception):
    """Raised when the reader of stdout is gone (`| head`): exit quietly."""


class CleanStream:
    """Writes text to `stream` without terminal control sequences; `write_raw` is for our own.

    It has no `buffer`, by which click would go around it. Raises BrokenPipeError, or OutputFailed where writing fails
    for another reason."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._cleaner = Cleaner()

    def __getattr__(self, name: str) -> Any:
        if name not in _PASSED_ON:
            raise AttributeError(name)
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _named_faults():
            self._stream.write(self._cleaner.feed(text))
        return len(text)

    def write_raw(self, text: str) -> None:
        with _named_faults():
            self._stream.write(self._cleaner.flush() + text)

    def flush(self) -> None:
        with _named_faults():
            self._stream.flush()


@contextlib.contextmanager
def _named_faults() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(f"Cannot write the output: {error.strerror}.", "Redirect it to another place.") from None


@contextlib.contextmanager
def cleaned_output() -> Iterator[None]:
    """Clean everything printed inside the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(cleaned, before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def cleaned(stream: TextIO | None) -> CleanStream | None:
    """Wrap `stream` so that it cleans what is written; None (closed before the start) stays None."""
    return stream if stream is None or isinstance(stream, CleanStream) else CleanStream(stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether somebody reads or types there; None or closed: nobody."""
    return stream is not None and not stream.closed and stream.isatty()


def error_text(error: CpuchatError) -> str:
    """Format a failure for stderr: what happened, and below it what to do."""
    hint = f"\n  {error.hint}" if error.hint else ""
    return clean(f"cpuchat: {error.message}{hint}")


def error_json(error: CpuchatError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message, "hint": error.hint}}


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    print(json_line(value), flush=True)


def json_line(value: Any) -> str:
    """Return one line of JSON with everything escaped that `clean` would replace: safe to print, and lossless."""
    return replace_unsafe(json.dumps(value, ensure_ascii=False), lambda character: json.dumps(character)[1:-1])
