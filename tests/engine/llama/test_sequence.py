"""Tests KV bookkeeping on a real context."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cpuchat.engine.llama.bindings import AbortFlag, llama
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.protocol.messages import LoadOptions
from tests.engine.conftest import Load


def held(model: Model) -> int:
    """Return the tokens in the cache as llama.cpp counts them."""
    return int(llama.llama_memory_seq_pos_max(llama.llama_get_memory(model.sequence.context), 0)) + 1


def test_state_goes_into_another_context(load: Load, tiny_model: Path) -> None:
    sequence = load(tiny_model).sequence
    tokens = list(b"something to remember")
    sequence.extend(tokens)
    state = sequence.state()
    assert sequence.state_size() == state.size > 0
    expected = sequence.step(65).copy()

    other = load(tiny_model).sequence
    other.extend(list(b"other text"))
    assert other.set_state(tokens, state)
    assert other.tokens == tokens
    np.testing.assert_array_equal(other.step(65), expected)


def test_wrong_state_empties_the_sequence(model: Model) -> None:
    model.sequence.extend(list(b"abc"))
    state = model.sequence.state()
    for tokens, wrong in (
        (list(b"abc"), np.frombuffer(b"no state at all" * 10, np.uint8)),
        (list(b"abc"), state[: state.size // 2]),
        (list(b"abcd"), state),
    ):
        assert not model.sequence.set_state(tokens, wrong)
        assert model.sequence.tokens == [] and held(model) == 0


def test_a_recurrent_model_stops_between_batches_only_unless_its_state_may_be_lost(
    load: Load, recurrent_model: Path, abort: AbortFlag
) -> None:
    sequence = load(recurrent_model).sequence
    sequence.extend(list(b"abc"))
    abort.set()
    for evaluate in (lambda: sequence.step(100), lambda: sequence.extend([100, 101])):
        with pytest.raises(Aborted):
            evaluate()
        assert sequence.tokens == list(b"abc") and not sequence.is_broken
    abort.clear()
    sequence.step(100)
    assert sequence.tokens == list(b"abcd")


class StopsAfter(AbortFlag):
    """Stops a batch when llama.cpp has asked `n` times, which it does after every node of its graph."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n
        self.callback = llama.ggml_abort_callback(self._asked)

    def _asked(self, _: object) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_batch_that_was_stopped_within_spoils_a_recurrent_state(load: Load, recurrent_model: Path) -> None:
    flag, text = StopsAfter(1 << 30), list(b"abcdefghijklmnopqrstuvwxyz")
    sequence = load(recurrent_model, LoadOptions(n_ctx=512, n_batch=64, n_ubatch=64), abort=flag).sequence
    sequence.extend(text)
    state = sequence.state(partial=True)
    flag.left = 20
    with pytest.raises(Aborted):
        sequence.extend([65] * 60)
    flag.left = 1 << 30
    assert sequence.is_broken and sequence.tokens == text and not sequence.can_cut(len(text))
    assert sequence.set_state(text, state, partial=True)
    assert not sequence.is_broken and sequence.can_cut(len(text))
    row = sequence.step(65).copy()
    sequence.clear()
    sequence.extend(text)
    np.testing.assert_array_equal(sequence.step(65), row)
    flag.left = 20
    sequence.step(66)  # an answer's pass is never stopped within
    assert flag.left == 20


@pytest.mark.parametrize("n", [0, 150])
def test_finished_part_of_a_stopped_batch_is_kept(load: Load, tiny_model: Path, n: int) -> None:
    flag, tokens = StopsAfter(1 << 30), [65 + i % 26 for i in range(500)]
    model = load(tiny_model, LoadOptions(n_ctx=512, n_batch=512, n_ubatch=16), abort=flag)
    sequence = model.sequence
    flag.left = n
    with pytest.raises(Aborted):
        sequence.extend(tokens)
    kept = len(sequence.tokens)
    assert kept % 16 == 0 and kept < 500 and (kept > 0) == (n > 0)
    assert sequence.tokens == tokens[:kept] and held(model) == kept
    flag.left = 1 << 30
    sequence.extend(tokens[kept:], n_outputs=1)
    row = sequence.logits(499 - kept).copy()
    sequence.clear()
    sequence.extend(tokens, n_outputs=1)
    np.testing.assert_allclose(row, sequence.logits(499), atol=2e-3)
