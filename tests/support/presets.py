"""Presets as a user writes them."""

from __future__ import annotations

from cpuchat.base import paths


def write_presets(text: str) -> None:
    paths.presets_file().parent.mkdir(parents=True, exist_ok=True)
    paths.presets_file().write_text(text)
