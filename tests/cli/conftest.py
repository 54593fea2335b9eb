"""Provides fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def slow_model(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that writes the letter c thousands of times, slowly enough to be stopped."""
    file = shared_folder / "slow" / "slow-F32.gguf"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        made = tmp_path_factory.mktemp("models") / file.name
        write_tiny_gguf(made, n_embd=512, n_layer=6, n_ff=2048, n_head=8, likely="c").rename(file)
    return file
