"""Provides servers that a file's tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import Server, server
from tests.support.tiny_gguf import CHATML, write_tiny_gguf


@pytest.fixture(scope="session")
def endless_model(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that writes the letter c until the context is full, slowly enough to be cut. It may reason."""
    file = shared_folder / "endless" / "endless-F32.gguf"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        made = tmp_path_factory.mktemp("models") / file.name
        template = CHATML + "{% if enable_thinking %}<think>\n{% endif %}"
        write_tiny_gguf(
            made, template=template, n_embd=512, n_layer=6, n_ff=2048, n_head=8, likely="c", n_ctx_train=8192
        ).rename(file)
    return file


@pytest.fixture(scope="session")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tiny_model, tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="module")
def endless(endless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server that drafts, and where eight requests may wait."""
    folder, drafting = tmp_path_factory.mktemp("served"), ("--drafters", "suffix", "--draft-depth", "4")
    with server(endless_model, folder, "--queue", "8", *drafting, ctx=8192) as running:
        yield running
