"""Tests the prompt and the answer loop on a real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from cpuchat.engine.decoding.decode import Decoder, DecodeResult, PrefillChunking
from cpuchat.engine.decoding.sampling import Sampler
from cpuchat.engine.llama.model import Model
from cpuchat.engine.states.store import StateStore
from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.engine.text.text_stream import TextStream
from cpuchat.protocol.messages import Event, Sampling, TextDelta
from tests.support.prefilling import prefilled, store_of
from tests.support.tiny_gguf import write_tiny_gguf

GREEDY = Sampling(temperature=0.0)
PROMPT = list(b"Once upon a time there was an engine that talked.")


class Answer:
    """One run of both loops; `text` is what was emitted."""

    def __init__(
        self,
        model: Model,
        prompt: list[int] = PROMPT,
        sampling: Sampling = GREEDY,
        max_tokens: int = 40,
        stop: tuple[str, ...] = (),
        on_event: Callable[[Event], None] = lambda _: None,
        tail: str = "",
        store: StateStore | None = None,
    ) -> None:
        self.deltas: list[TextDelta] = []
        self.progress: list[tuple[int, int]] = []
        self.on_event = on_event
        self.prefill = prefilled(model, prompt, store, lambda *p: self.progress.append(p))
        stream = TextStream(7, self._emit, model.vocab.piece, ReasoningSplitter(tail), stop, perf_counter())
        sampler = Sampler(sampling, model.vocab.n_tokens)
        decoder = Decoder(model.sequence, sampler, stream, model.vocab.is_eog, max_tokens)
        self.result: DecodeResult = decoder.run(self.prefill.row)

    def _emit(self, event: Event) -> None:
        assert isinstance(event, TextDelta) and event.request_id == 7
        self.deltas.append(event)
        self.on_event(event)

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.deltas)


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
    answer = Answer(model, max_tokens=12)
    assert answer.result.stop_reason == "max_tokens"
    assert len(answer.result.tokens) == 12
    sequence = model.sequence
    assert sequence.tokens == PROMPT + answer.result.tokens[:-1]  # the last one waits for the next turn
    sequence.clear()
    sequence.extend(PROMPT[:32])
    sequence.extend(PROMPT[32:], n_outputs=1)
    row = sequence.logits(len(PROMPT) - 33)
    expected = []
    for _ in range(12):
        expected.append(int(row.argmax()))
        row = sequence.step(expected[-1])
    assert answer.result.tokens == expected
    assert answer.text == b"".join(map(model.vocab.piece, expected)).decode()


def test_same_seed_gives_the_same_text(load: Callable[..., Model], tiny_model: Path) -> None:
    sampling = Sampling(seed=5, temperature=1.2, repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
    model = load(tiny_model)
    store = store_of(model)
    first = Answer(model, sampling=sampling, max_tokens=60, store=store)
    again = Answer(model, sampling=sampling, max_tokens=60, store=store)  # the prompt comes from the cache
    assert again.prefill.cache_n == len(PROMPT) and again.prefill.prompt_n == 0
    fresh = Answer(load(tiny_model), sampling=sampling, max_tokens=60)
    assert first.text == again.text == fresh.text
    other = Answer(model, sampling=Sampling(seed=6, temperature=1.5), max_tokens=60)
    assert other.text != first.text


def test_first_token_is_said_at_once_and_counts_add_up(model: Model) -> None:
    answer = Answer(model, max_tokens=200)
    first = answer.deltas[0]
    assert first.n_tokens == first.predicted_n == 1 and first.text
    assert sum(d.n_tokens for d in answer.deltas) == 200 == answer.deltas[-1].predicted_n
    assert len(answer.deltas) < 200  # later ones are gathered
    counts = [d.predicted_n for d in answer.deltas]
    assert counts == sorted(counts)
    assert answer.result.last >= answer.result.first > 0
    assert answer.result.overhead_seconds > 0


def test_stop_string_is_never_shown(model: Model) -> None:
    whole = Answer(model, max_tokens=60).text
    stop = whole[20:24]
    at = whole.index(stop)
    answer = Answer(model, max_tokens=60, stop=("never this", stop))
    assert answer.result.stop_reason == "stop_string"
    assert answer.text == whole[:at]
    # What could have become a stop string is not lost when it does not.
    answer = Answer(model, max_tokens=24, stop=(Answer(model, max_tokens=24).text[-2:] + "\0",))
    assert answer.result.stop_reason == "max_tokens"
    assert answer.text == Answer(model, max_tokens=24).text


def test_end_of_generation(load: Callable[..., Model], tmp_path: Path) -> None:
    model = load(write_tiny_gguf(tmp_path / "ending.gguf", eos_bias=1.0))
    answer = Answer(model, sampling=Sampling(seed=1, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0), max_tokens=400)
    assert answer.result.stop_reason == "end"
    assert not any(map(model.vocab.is_eog, answer.result.tokens))
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
