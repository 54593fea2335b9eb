"""Parses TOML that people edit, in a time bounded by its size."""

from __future__ import annotations

import re
import tomllib
from typing import Any

_MAX_PARTS = 32
"""Parts of a dotted key. `tomllib` takes quadratic time: minutes for 50,000, which are 100 kB."""
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_PART}[ \t]*+\.[ \t]*+){{{_MAX_PARTS}}}", re.ASCII)


def loads(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError for invalid TOML, numbers with too many digits, and too deep nesting."""
    if found := _LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"a key with over {_MAX_PARTS} dotted parts (at line {line})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None
