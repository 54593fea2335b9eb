"""Measuring a model in a worker of its own, for the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from cpuchat.backend.local import LocalBackend
from cpuchat.errors import from_code
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol import Failed, LoadOptions, LoadProgress, ModelInfo
from cpuchat.tune.measure import DecodeRate, MeasureFailed, measure_decode


async def measure_model(
    path: Path,
    options: LoadOptions,
    spec: PlacementSpec,
    on_progress: Callable[[LoadProgress], None] | None = None,
) -> tuple[ModelInfo, DecodeRate]:
    """Load a model, measure how fast it decodes, and let it go.

    Raises:
        MeasureFailed: see `measure_decode`.
        CpuchatError: the model could not be loaded.
    """
    backend = LocalBackend()
    try:
        async with contextlib.aclosing(backend.load(path, options, spec)) as events:
            async for event in events:
                if isinstance(event, Failed):
                    raise from_code(event.code, event.message, event.hint)
                if isinstance(event, LoadProgress) and on_progress is not None:
                    on_progress(event)
        if backend.model is None:
            raise MeasureFailed("The model was not loaded.", "Try again.")
        return backend.model, await measure_decode(backend.generate)
    finally:
        await backend.close()
