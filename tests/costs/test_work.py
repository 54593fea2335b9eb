"""The work of a pass, of small made-up models and of known sizes."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.costs.model import ALIKE, bytes_read, experts_read, parts
from cpuchat.models.synthetic.model import SHAPES, header_of
from cpuchat.models.traffic import model_work
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.model_info import Attention, ModelWork, Weights
from tests.costs.made_up import work

DENSE = ModelWork(
    n_layer=1, dense=(Weights("Q8_0", 1000, 0),), row=10, attention=(Attention(2, 0), Attention(3, 0, window=100))
)


def test_a_pass_reads_weights_rows_and_the_cache() -> None:
    assert bytes_read(DENSE, 1, 0) == 1000 + 10 + 5
    assert bytes_read(DENSE, 4, 50) == 1000 + 40 + 54 * 5


def test_a_window_limits_what_is_read_of_the_cache() -> None:
    assert bytes_read(DENSE, 1, 99) == 1010 + 100 * 5
    assert bytes_read(DENSE, 1, 500) == 1010 + 501 * 2 + 100 * 3
    assert bytes_read(DENSE, 4, 500) == 1040 + 504 * 2 + 103 * 3


def test_steps_are_read_whole() -> None:
    stepped = ModelWork(n_layer=1, dense=(), attention=(Attention(1, 0, step=256),))
    assert [bytes_read(stepped, 1, n) for n in (0, 255, 256, 1000)] == [256, 256, 512, 1024]


def test_a_recurrent_state_is_read_and_written() -> None:
    assert bytes_read(ModelWork(n_layer=1, dense=(), state=7), 3, 100) == 14


def test_of_the_experts_those_that_some_token_uses() -> None:
    apart = ModelWork(n_layer=1, dense=(), experts=(Weights("Q8_0", 6400, 0),), n_expert=64, n_expert_used=8)
    of_text = msgspec.structs.replace(apart, alike=ALIKE)
    assert bytes_read(of_text, 1) == pytest.approx(800)
    assert bytes_read(apart, 2) == pytest.approx(6400 * (1 - 0.875**2))
    assert bytes_read(of_text, 3) == pytest.approx(6400 * (1 - 0.875**2))  # two more tokens count as one
    assert bytes_read(of_text, 1e6) == pytest.approx(6400)
    assert experts_read(0, 0, 5) == 0
    assert experts_read(4, 9, 1) == 4


def test_the_multiply_adds_of_a_token_are_the_parameters_that_it_uses() -> None:
    ours = work("8b")
    madds = sum(part.madds for part in parts(ours, 1))
    embedding = SHAPES["8b"].n_vocab * SHAPES["8b"].n_embd
    assert madds == pytest.approx(header_of("8b").n_params - embedding, rel=1e-3)


def test_every_chat_has_a_kv_cache_of_its_own_and_the_weights_are_shared() -> None:
    ours = work("8b")
    kv = 1000 * sum(one.nbytes for one in ours.attention)
    alone, together = bytes_read(ours, 1, 999), bytes_read(ours, 10, 999, sequences=10)
    assert together - alone == pytest.approx(9 * kv + 9 * ours.row, rel=1e-6)


def test_tokens_of_one_text_share_experts_and_different_texts_do_not() -> None:
    apart = work("30b-a3b", "Q4_K_M")
    alike = msgspec.structs.replace(apart, alike=0.5)
    experts = sum(one.nbytes for one in apart.experts)
    single = bytes_read(apart, 1)
    assert bytes_read(alike, 1) == pytest.approx(single)
    assert bytes_read(alike, 9) == pytest.approx(bytes_read(apart, 5), rel=0.01)
    assert bytes_read(alike, 8, sequences=8) == pytest.approx(bytes_read(apart, 8, sequences=8))
    assert bytes_read(alike, 1000) == pytest.approx(single + experts * 120 / 128, rel=0.02)  # a prompt needs them all


def test_a_quantized_cache_slows_prompts_down_and_not_decoding() -> None:
    def attention(kind: str, n_tokens: int) -> float:
        options = LoadOptions(type_k=kind, type_v=kind)  # type: ignore[arg-type]
        found = model_work(header_of(SHAPES["1.5b"], "Q4_K_M"), options)
        return sum(part.madds for part in parts(found, n_tokens, 4096) if part.type == "KV")

    assert attention("q8_0", 1) == attention("f16", 1)
    assert attention("q8_0", 512) == pytest.approx(4 * attention("f16", 512))
