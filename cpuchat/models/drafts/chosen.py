"""Remembers the draft model that the user chose for a model: `draft_models.json` of the data folder."""

from __future__ import annotations

import os
from pathlib import Path

from cpuchat import paths
from cpuchat.files import JsonCache


class ChosenDrafts:
    """The arguments for `choose_draft` by the real path of the target: in the Hugging Face cache, its content."""

    def __init__(self) -> None:
        self._cache = JsonCache(paths.chosen_drafts_file(), str, version=1, max_entries=500)

    def of(self, target: Path) -> str:
        """Return what was chosen for `target`; "" where nothing was."""
        return self._cache.read().get(os.path.realpath(target), "")

    def put(self, target: Path, wanted: str) -> None:
        """Remember `wanted` for `target`; "" or "auto" forgets it."""
        key = os.path.realpath(target)
        if wanted in ("", "auto"):
            self._cache.remove(key)
        else:
            self._cache.put(key, wanted)
