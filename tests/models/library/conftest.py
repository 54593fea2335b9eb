"""What the tests of the library share."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.models.synthetic.model import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small model, Q8_0."""
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", "tiny", "Q8_0")


@pytest.fixture
def no_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the package's demo models by an empty folder."""
    monkeypatch.setattr(paths, "demo_dir", lambda: tmp_path / "demo")
    (tmp_path / "demo").mkdir()
    return tmp_path / "demo"
