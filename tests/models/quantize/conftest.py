"""Sources to quantize."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.synthetic.model import write_model
from tests.support.shapes import TINY_LLAMA
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of rows of 256 values, so that every type fits, in F16."""
    return write_model(tmp_path_factory.mktemp("source") / "llama-F16.gguf", TINY_LLAMA, "F16")


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough in the work to be stopped in the middle of it: IQ types search long for each block."""
    folder = tmp_path_factory.mktemp("source")
    return write_tiny_gguf(folder / "large-F32.gguf", n_embd=512, n_layer=6, n_ff=2048, n_head=8)
