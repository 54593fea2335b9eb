"""TOML that people edit, read in a time that its size bounds."""

from __future__ import annotations

import re
import tomllib
from typing import Any

_MOST_PARTS = 32
"""Of a dotted key. `tomllib` takes the square of their number: minutes for 50,000, which are 100 kB."""
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_PART}[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}", re.ASCII)


def loads(text: str) -> dict[str, Any]:
    """Raises ValueError for what is no TOML, has a number of too many digits, or is nested too deep."""
    if found := _LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"a key of over {_MOST_PARTS} dotted parts (at line {line})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None
