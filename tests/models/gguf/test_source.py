"""Tests headers read from something else than a file: how much is asked for, and what may go wrong."""

from __future__ import annotations

import os
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from cpuchat.base.errors import ModelDamaged, ModelNotFound
from cpuchat.models.gguf.header import header_from
from cpuchat.models.gguf.parse import FileSource
from tests.support.tiny_gguf import finish

MB = 1 << 20


class Recorded:
    """Content that remembers what was asked of it."""

    name = "recorded.gguf"

    def __init__(self, content: bytes, size: int | None = None) -> None:
        self.content = content
        self.size = len(content) if size is None else size
        self.asked: list[tuple[int, int]] = []

    def read(self, offset: int, count: int) -> bytes:
        self.asked.append((offset, count))
        return self.content[offset : offset + count]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a model with a header of 5 MB and weights of 4 MB."""
    writer = reference.GGUFWriter(path := tmp_path_factory.mktemp("source") / "large.gguf", "llama")
    writer.add_token_list([f"token {i}" for i in range(250_000)])
    writer.add_tensor("token_embd.weight", np.zeros((1024, 1024), np.float32))
    finish(writer)
    return path.read_bytes()


def test_chunks_follow_each_other_and_grow(large: bytes) -> None:
    source = Recorded(large)
    header = header_from(source, Path("x.gguf"))
    assert source.asked == [(0, MB), (MB, MB), (2 * MB, 2 * MB), (4 * MB, 4 * MB)]
    assert header.data_offset < 8 * MB


def test_content_shorter_than_its_announced_size(large: bytes) -> None:
    with pytest.raises(ModelDamaged, match=r"recorded\.gguf .* byte 3000000 could not be read"):
        header_from(Recorded(large[:3_000_000], size=len(large)), Path("x.gguf"))
    with pytest.raises(ModelDamaged, match=r"'token_embd\.weight' ends at byte"):
        header_from(Recorded(large, size=len(large) - 100), Path("x.gguf"))


def test_only_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", tmp_path, Path("/dev/zero")):
        with pytest.raises(ModelNotFound, match="not a regular file"):
            FileSource(path)
