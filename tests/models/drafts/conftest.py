"""Provides fixtures of the tests of draft models."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import DEMO_FILES


@pytest.fixture
def library(tmp_path: Path) -> Library:
    """Return a library over an empty cache and the folder `mine`."""
    (tmp_path / "mine").mkdir()
    return Library([tmp_path / "mine"], cache=tmp_path / "hub")


@pytest.fixture
def demo() -> dict[str, Path]:
    return {name: paths.demo_dir() / file for name, file in DEMO_FILES.items()}
