"""Provides llama.cpp's own judgment of a grammar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpuchat.engine.decoding.guided import Grammar
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.vocab import Vocab
from tests.support.cores import ONE_CPU
from tests.support.engine_chat import OPTIONS

Matches = Callable[[str, str], bool]


@pytest.fixture(scope="module")
def vocab(tiny_model: Path) -> Iterator[Vocab]:
    model = Model.load(tiny_model, OPTIONS, abort=AbortFlag(), on_progress=lambda *_: None, threads=ONE_CPU)  # type: ignore[arg-type]
    yield model.vocab
    model.free()


@pytest.fixture(scope="module")
def matches(vocab: Vocab) -> Matches:
    """Return whether a grammar allows a text, byte by byte: the token of a byte is its value."""

    def _matches(grammar: str, text: str) -> bool:
        one = Grammar(vocab, grammar)
        for byte in text.encode():
            if not one.allows(byte):
                return False
            one.accept(byte)
        return one.is_complete()

    return _matches
