"""A recorded answer of a real model, which the tour plays beside what runs live.

`benchmarks/record_tour.py` writes it. Every text and figure of it was measured; only the pace is chosen: parts come as
they came then.
"""

from __future__ import annotations

import msgspec

from cpuchat import paths
from cpuchat.timings import Timings


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Text that came so many seconds after the question was sent. `drafter` proposed it ("" = the model itself)."""

    at: float
    text: str
    drafter: str = ""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `model` and `draft` are names with quantization, `machine` the CPU and the threads."""

    question: str
    model: str
    draft: str
    machine: str
    parts: tuple[Part, ...]
    timings: Timings


def load_recording() -> Recording | None:
    """Return the recording of the package; None where it has none."""
    try:
        return msgspec.json.decode(paths.recording_file().read_bytes(), type=Recording)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return None
