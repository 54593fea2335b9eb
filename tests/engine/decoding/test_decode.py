"""Tests the prompt and the answer loop on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cpuchat.engine.decoding.decode import PrefillChunking
from cpuchat.engine.llama.model import Model
from cpuchat.protocol.messages import Sampling
from tests.engine.conftest import Load
from tests.support.pairs import Said, Talker
from tests.support.prefilling import prefilled
from tests.support.tiny_gguf import write_tiny_gguf

PROMPT = list(b"Once upon a time there was an engine that talked.")


def said(model: Model, max_tokens: int = 60, **more: Any) -> Said:
    """Return an answer to `PROMPT`, without drafts, of which nothing is kept."""
    return Talker(model).say(PROMPT, max_tokens=max_tokens, **more)


def test_prefill_reports_every_batch(model: Model) -> None:
    prompt = [65 + i % 26 for i in range(100)]  # batches of 32
    seen: list[tuple[int, int]] = []
    result = prefilled(model, prompt, on_progress=lambda *p: seen.append(p))
    assert seen == [(0, 0), (32, 0), (64, 0), (96, 0), (100, 0)]
    assert (result.cache_n, result.prompt_n) == (0, 100)
    seen.clear()
    result = prefilled(model, prompt[:90] + prompt[:20], on_progress=lambda *p: seen.append(p))
    assert seen == [(90, 90), (110, 90)]
    assert (result.cache_n, result.prompt_n) == (90, 20)


def test_greedy_answer_is_the_argmax_chain(model: Model) -> None:
    answer = said(model, 12)
    assert answer.reason == "max_tokens"
    assert len(answer.tokens) == 12
    sequence = model.sequence
    assert sequence.tokens == PROMPT + answer.tokens[:-1]  # the last one waits for the next turn
    sequence.clear()
    sequence.extend(PROMPT[:32])
    sequence.extend(PROMPT[32:], n_outputs=1)
    row = sequence.logits(len(PROMPT) - 33)
    expected = []
    for _ in range(12):
        expected.append(int(row.argmax()))
        row = sequence.step(expected[-1])
    assert answer.tokens == expected
    assert answer.text == b"".join(map(model.vocab.piece, expected)).decode()


def test_same_seed_gives_the_same_text(load: Load, tiny_model: Path) -> None:
    sampling = Sampling(seed=5, temperature=1.2, repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
    talker = Talker(load(tiny_model))
    first = talker.say(PROMPT, sampling=sampling, max_tokens=60)
    again = talker.say(PROMPT, sampling=sampling, max_tokens=60)  # the prompt comes from the cache
    assert again.cache_n == len(PROMPT)
    assert first.text == again.text == said(load(tiny_model), sampling=sampling).text
    assert first.text != said(talker.target, sampling=Sampling(seed=6, temperature=1.5)).text


def test_first_token_is_said_at_once_and_counts_add_up(model: Model) -> None:
    answer = said(model, 200)
    first = answer.deltas[0]
    assert first.n_tokens == first.predicted_n == 1 and first.text
    assert sum(d.n_tokens for d in answer.deltas) == 200 == answer.deltas[-1].predicted_n
    assert len(answer.deltas) < 200  # later ones are gathered
    counts = [d.predicted_n for d in answer.deltas]
    assert counts == sorted(counts)
    assert answer.result.last >= answer.result.first > 0
    assert answer.result.overhead_seconds > 0


def test_stop_string_is_never_shown(model: Model) -> None:
    whole = said(model).text
    stop = whole[20:24]
    at = whole.index(stop)
    answer = said(model, stop=("never this", stop))
    assert answer.reason == "stop_string"
    assert answer.text == whole[:at]
    # What could have become a stop string is not lost when it does not.
    whole = said(model, 24).text
    answer = said(model, 24, stop=(whole[-2:] + "\0",))
    assert answer.reason == "max_tokens"
    assert answer.text == whole


def test_end_of_generation(load: Load, tmp_path: Path) -> None:
    model = load(write_tiny_gguf(tmp_path / "ending.gguf", eos_bias=1.0))
    answer = said(model, 400, sampling=Sampling(seed=1, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0))
    assert answer.reason == "end"
    assert not any(map(model.vocab.is_eog, answer.tokens))
    assert "<|im_end|>" not in answer.text


def test_batches_shrink_with_the_context() -> None:
    chunking = PrefillChunking(matmul=2 * 13.8e6, attention=4 * 1536, n_threads=2, wide_vectors=True)  # a 1.5B shape
    sizes = [chunking.size(n, 10_000, 512) for n in (0, 1000, 2000, 4000, 8000, 30_000)]
    assert sizes[0] == 512 and sizes[-1] == 64
    assert sizes == sorted(sizes, reverse=True) and all(s % 64 == 0 for s in sizes)
    for n, size in ((2000, sizes[2]), (4000, sizes[3])):
        assert size * (n + size) * chunking.attention / (2 * 40e9) <= 0.05
    assert chunking.size(100_000, 1000, 20) == 20
    assert PrefillChunking(2 * 235e6, 0, 2, False).size(0, 1000, 512) == 64


def test_no_batch_is_less_than_a_tile_unless_the_prompt_is() -> None:
    chunking = PrefillChunking(matmul=2 * 235e6, attention=0, n_threads=2, wide_vectors=False)
    for left in range(1, 400):
        sizes: list[int] = []
        while (rest := left - sum(sizes)) > 0:
            sizes.append(chunking.size(4000, rest, 256))
        assert min(sizes) >= min(left, 64) and max(sizes) <= 256, left
