"""Counts the tokens of all stored answers. Reads only: it can run beside an app that is writing."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

_QUERY = """
    SELECT COALESCE(SUM(MAX(json_extract(timings, '$.prompt_n'), 0)), 0),
           COALESCE(SUM(MAX(json_extract(timings, '$.predicted_n'), 0)), 0)
    FROM messages WHERE role = 'assistant' AND json_valid(timings)
"""


def token_counts(file: Path) -> tuple[int, int]:
    """Return how many prompt tokens were evaluated, and how many were written; zeros for a file that cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as db:
            prompt, written = db.execute(_QUERY).fetchone()
            return int(prompt), int(written)
    except (sqlite3.Error, OverflowError, ValueError):
        return 0, 0
