"""Collects what belongs to the load of a model: its tuned settings, recommended sampling and its draft model.

The catalog is imported only here, in threads: not before the app's first paint.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cpuchat.config.servers import ServerModel, Source
from cpuchat.config.settings import Settings
from cpuchat.models.library.library import Library
from cpuchat.models.library.usage import UsageLog
from cpuchat.models.machine import Tuned, TunedSettings
from cpuchat.protocol.messages import ModelLoaded

if TYPE_CHECKING:
    from cpuchat.models.catalog import Recommended
    from cpuchat.models.drafts.choice import DraftChoice


async def tuned_for(model: Source) -> Tuned | None:
    """Return what tuning found for a model; None for one on a server."""
    return None if isinstance(model, ServerModel) else await asyncio.to_thread(TunedSettings().find, model)


async def recommended_for(model: Source) -> Recommended | None:
    """Return the sampling that is recommended for a model; None for one on a server. Reads header and catalog."""
    return None if isinstance(model, ServerModel) else await asyncio.to_thread(_recommended, model)


def _recommended(model: Path) -> Recommended:
    from cpuchat.models.catalog import recommended

    return recommended(model)


async def find_draft(target: Path, chosen: Settings, library: Library, *, strict: bool, calibrate: bool) -> DraftChoice:
    """Return the draft model by the settings `chosen`. Arguments and errors as of `draft_of_settings`."""

    def find() -> DraftChoice:
        from cpuchat.models.drafts.choice import draft_of_settings

        return draft_of_settings(target, chosen.speculation, library, strict=strict, calibrate=calibrate)

    return await asyncio.to_thread(find)


async def loaded(event: ModelLoaded, note: str, path: Path, draft: Path | None, library: Library) -> ModelLoaded:
    """Remember that the model was loaded; returns the event with one more note.

    A draft model that the engine left out has the engine's note, which says why; `note` on it would contradict.
    """
    left_out = draft is not None and not event.model.draft
    models = [path] if draft is None or left_out else [path, draft]

    def remember() -> None:
        UsageLog().loaded(models)
        for model in models:
            library.opened(model)

    await asyncio.to_thread(remember)
    if not note or left_out:
        return event
    return ModelLoaded(model=msgspec.structs.replace(event.model, notes=(*event.model.notes, note)))
