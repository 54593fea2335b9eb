"""Provides fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that writes the letter c thousands of times, slowly enough to be stopped."""
    file = tmp_path_factory.mktemp("models") / "slow-F32.gguf"
    return write_tiny_gguf(file, n_embd=512, n_layer=6, n_ff=2048, n_head=8, likely="c")
