"""Fixtures that every room may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's settings, chats or caches."""
    for kind in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"CPUCHAT_{kind}_DIR", str(tmp_path / kind.lower()))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model of the llama architecture with random weights and a ChatML template, context 4096."""
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny-F32.gguf")


@pytest.fixture(scope="session")
def tiny_model_without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a chat template."""
    return write_tiny_gguf(tmp_path_factory.mktemp("models") / "plain-F32.gguf", with_template=False)
