"""Checks whether two models fit into memory at the same time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cpuchat.compare.side import Side
from cpuchat.errors import CpuchatError
from cpuchat.models.drafts.choice import choose_draft
from cpuchat.models.fit import draft_memory, gigabytes, plan_memory
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library.library import Library
from cpuchat.models.machine import memory_here
from cpuchat.settings import Settings


def fit_together(sides: Sequence[Side], settings: Sequence[Settings], library: Library) -> tuple[int, str]:
    """Return the context for both, in tokens, and why they do not fit together, "" when they do.

    With the draft models that they will load. A file that both map is counted once. The context is 0 (each chooses)
    where a header cannot be read: that side will not load anyway.
    """
    try:
        headers = [read_model(Path(side.path)) for side in sides]
    except (CpuchatError, OSError):
        return 0, ""
    available = memory_here(settings[0])
    options = [msgspec.structs.replace(one.load_options(), from_disk=False) for one in settings]
    needs = [plan_memory(header, option, available)[0] for header, option in zip(headers, options, strict=True)]
    total = sum(need.least for need in needs)
    same_file = os.path.realpath(sides[0].path) == os.path.realpath(sides[1].path)
    if same_file and all(option.load_mode == "mmap" for option in options):
        total -= min(need.weights - need.reclaimable for need in needs)
    n_ctx = min(need.n_ctx for need in needs)
    total += sum(_draft(side, one, library, n_ctx) for side, one in zip(sides, settings, strict=True))
    if total <= available:
        return n_ctx, ""
    return n_ctx, (
        f"Both models need {gigabytes(total)} GB, and {gigabytes(available)} GB are available: they are loaded in turn."
    )


def _draft(side: Side, settings: Settings, library: Library, n_ctx: int) -> int:
    """Return the bytes that the side's draft model needs; 0 without one."""
    try:
        draft, _ = choose_draft(Path(side.path), settings.speculation.wanted_draft, library, strict=False)
        return draft_memory(read_model(draft), settings.load_options(), n_ctx).least if draft is not None else 0
    except (CpuchatError, OSError):  # it is then loaded without
        return 0
