"""What the tests of `cpuchat models` share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.library.files import cached


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


@pytest.fixture
def tiny(hub: Path, tiny_model: Path) -> Path:
    """The tiny model in that cache."""
    return cached(hub, "some/tiny-GGUF", "tiny-F32.gguf", tiny_model)
