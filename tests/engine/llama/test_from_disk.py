"""Tests loading a model whose weights stay on disk, with less memory available than it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cpuchat.base.errors import DoesNotFit, UsageError
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.models import fit
from cpuchat.models.gguf.header import read_model
from cpuchat.protocol.messages import LoadOptions
from tests.engine.llama.test_sequence import StopsAfter
from tests.support.cores import ONE_CPU
from tests.support.tiny_gguf import write_tiny_gguf

Load = Callable[..., Model]

OPTIONS = LoadOptions(n_ctx=512, n_batch=64, n_ubatch=64, from_disk=True)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large-F32.gguf"
    return write_tiny_gguf(path, n_layer=8, n_embd=512, n_ff=1024)


@pytest.fixture(scope="module")
def available(file: Path) -> int:
    """Bytes of memory into which only half of the weights fit."""
    header = read_model(file)
    return fit.required_memory(header, OPTIONS, 512).min_bytes + header.size // 2


def test_it_computes_the_same(load: Load, file: Path, available: int) -> None:
    with pytest.raises(DoesNotFit, match="weights") as caught:
        load(file, msgspec.structs.replace(OPTIONS, from_disk=False), available=available)
    assert "--from-disk" in caught.value.hint
    model = load(file, OPTIONS, available=available)
    assert any("read from disk for each token" in note for note in model.info.notes)
    plain = load(file, OPTIONS)  # it fits: as ever
    assert not plain.options.from_disk and not plain.info.notes
    np.testing.assert_allclose(model.sequence.step(65), plain.sequence.step(65), rtol=1e-4, atol=1e-4)


def test_cache_and_buffers_have_to_fit(load: Load, file: Path) -> None:
    with pytest.raises(DoesNotFit, match="KV cache"):
        load(file, OPTIONS, available=1_000_000)


def test_it_cannot_be_locked(load: Load, file: Path, available: int) -> None:
    with pytest.raises(UsageError, match="locked"):
        load(file, msgspec.structs.replace(OPTIONS, mlock=True), available=available)


def test_decoding_can_be_cancelled_inside_of_a_pass(file: Path, available: int) -> None:
    flag = StopsAfter(1 << 30)
    model = Model.load(file, OPTIONS, ONE_CPU, on_progress=lambda *_: None, abort=flag, available=available)
    try:
        sequence = model.sequence
        sequence.extend(list(b"abc"))
        flag.left = 10  # nodes of a graph that has some for each of 8 layers
        with pytest.raises(Aborted):
            sequence.step(100)
        assert sequence.tokens == list(b"abc")
        flag.left = 1 << 30
        assert np.isfinite(sequence.step(100)).all()
    finally:
        model.free()
