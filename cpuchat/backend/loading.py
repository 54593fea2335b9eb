"""Loads a model to be measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import Interrupted, MeasureFailed, from_code
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import Failed, LoadCancelled, LoadOptions, LoadProgress, ModelLoaded
from cpuchat.protocol.model_info import ModelInfo


async def load_to_measure(
    backend: LocalBackend,
    path: Path,
    options: LoadOptions,
    spec: PlacementSpec,
    stopped: Callable[[], bool],
    tell: Callable[[LoadProgress], None] = lambda _: None,
) -> ModelInfo:
    """Load a model with its draft model, until `stopped`, which is asked at every step. Raises Interrupted: stopped;
    MeasureFailed: the draft model was left out; CpuchatError: the model cannot be loaded."""
    async with contextlib.aclosing(backend.load(path, options, spec)) as events:
        async for event in events:
            match event:
                case LoadProgress():
                    tell(event)
                    if stopped():
                        await backend.cancel()
                case ModelLoaded() if options.draft_path and not event.model.draft:
                    raise MeasureFailed(next(iter(event.model.notes[-1:]), "The draft model was not loaded."))
                case ModelLoaded():
                    return event.model
                case Failed() if not stopped():
                    raise from_code(event.code, event.message, event.hint)
                case Failed() | LoadCancelled():
                    raise Interrupted("Stopped.")
    raise MeasureFailed("The model was not loaded.", "Measure again.")
