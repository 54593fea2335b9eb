"""Samples: 16-bit, mono, little-endian."""

from __future__ import annotations

import numpy as np

_AUDIBLE = 0.01
"""Of full scale."""
_BEFORE_SECONDS, _AFTER_SECONDS = 0.03, 0.2


def trimmed(samples: bytes, rate: int) -> bytes:
    """Return the samples without most of the silence around them: hibari leaves 0.3 s before and 0.46 s after."""
    values = np.frombuffer(samples, "<i2")
    audible = np.flatnonzero(np.abs(values.astype(np.int32)) > _AUDIBLE * 32768)
    if not audible.size:
        return b""
    start = max(0, int(audible[0]) - int(_BEFORE_SECONDS * rate))
    return values[start : int(audible[-1]) + 1 + int(_AFTER_SECONDS * rate)].tobytes()
