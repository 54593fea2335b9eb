"""A chat with a pair of models, for the tests of drafting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pair_chat import PairChat
from tests.support.pairs import pair_files


@pytest.fixture
def chat() -> Iterator[PairChat]:
    chat = PairChat()
    yield chat
    chat.engine.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return pair_files(tmp_path_factory.mktemp("pair"), 0.5)
