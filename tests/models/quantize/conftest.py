"""Sources to quantize."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.models.synthetic.model import write_model
from tests.support.shapes import TINY_LLAMA
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a llama in F16 with rows of 256 values, which every type accepts."""
    return write_model(tmp_path_factory.mktemp("source") / "llama-F16.gguf", TINY_LLAMA, "F16")


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a source that takes long enough to be stopped: IQ types search long for each block."""
    folder = tmp_path_factory.mktemp("source")
    return write_tiny_gguf(folder / "large-F32.gguf", n_embd=512, n_layer=6, n_ff=2048, n_head=8)
