"""Common prefixes of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two lists, arrays or byte strings (both of one kind)."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    # Comparing whole slices is far faster than a loop.
    while low < high:  # a[:low] is common, a[:high] is not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
