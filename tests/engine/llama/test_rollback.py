"""Tests rolling back rejected tokens, with every kind of memory that llama.cpp has, on real contexts; and its memory.

What counts is that nothing of a rejected token is left: not in the next logits, not in those a hundred tokens later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cpuchat.engine.decoding import decode as speculative
from cpuchat.engine.drafting import speculator
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama import sequence as sequence_module
from cpuchat.engine.llama.bindings import AbortFlag, llama
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import (
    Aborted,
    Bounded,
    Checkpoint,
    NoRollback,
    Rollback,
    Sequence,
    can_roll_back,
    detect_rollback,
    request_rollback,
)
from cpuchat.models import fit
from cpuchat.models.gguf.header import read_model
from cpuchat.protocol.messages import LoadOptions, Sampling, Speculation
from cpuchat.speculation.stats import PassRecord
from tests.engine.conftest import Load
from tests.support.pairs import FLAT, Talker, Wandering, assert_same
from tests.support.tiny_gguf import Architecture, write_tiny_gguf

KINDS: dict[Architecture, str] = {
    "llama": "exact", "mamba": "checkpoint", "jamba": "checkpoint", "lfm2": "bounded", "nemotron_h": "bounded",
    "qwen35": "bounded",
}  # fmt: skip
# An F32 cache: what remains is the rounding of passes of different lengths, 1e-2 of logits in the hundreds.
OPTIONS = LoadOptions(n_ctx=512, n_batch=64, n_ubatch=32, type_k="f32", type_v="f32", flash_attn="off")
TOLERANCE = 0.02
PROMPT = list(b"The quick brown fox jumps over")
LENGTH = 160
WINDOW = 224
"""With ubatches of 32 tokens, a window-sized cache has 256 cells: not one is to spare."""
LOST_CELL = 2e-3
"""One cell that is lost makes twice this difference, rounding a third of it."""


@pytest.fixture(autouse=True)
def _cheap_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow large snapshots: the state of the test models is large compared with their weights."""
    monkeypatch.setattr(fit, "COPY_SHARE", 10.0)


@pytest.fixture
def abort(_kept_abort: AbortFlag) -> AbortFlag:
    return _kept_abort


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rollback")
    files = {arch: write_tiny_gguf(folder / f"{arch}-F32.gguf", arch=arch, n_layer=3) for arch in KINDS}
    return {**files, "gemma3": write_tiny_gguf(folder / "gemma3.gguf", arch="gemma3", n_layer=3, window=WINDOW)}


@pytest.fixture(params=KINDS)
def any_model(request: pytest.FixtureRequest, files: dict[str, Path], reuse: Load) -> Model:
    return reuse(files[request.param], OPTIONS)


@pytest.fixture
def bounded(files: dict[str, Path], load: Load) -> Sequence:
    return load(files["qwen35"], OPTIONS).sequence


@pytest.fixture
def checkpoint(files: dict[str, Path], load: Load) -> Sequence:
    return load(files["jamba"], OPTIONS).sequence


def plain_text(sequence: Sequence, n: int = LENGTH) -> tuple[list[int], list[np.ndarray]]:
    """Return the greedy text after the prompt, token by token, and the logits before each token."""
    sequence.clear()
    sequence.extend(PROMPT, n_outputs=1)
    row = sequence.logits(len(PROMPT) - 1)
    text, rows = [], []
    for _ in range(n):
        rows.append(row.copy())
        text.append(int(row.argmax()))
        row = sequence.step(text[-1])
    return text, rows


def drafts(text: list[int], at: int, most: int, rng: random.Random) -> list[int]:
    """Return what a drafter might propose after text[:at]: up to `most` tokens, only the first ones right."""
    n = rng.randint(0, most)
    right = rng.choice([0, n, rng.randint(0, n)])
    return [*text[at : at + right], *(rng.randrange(32, 127) for _ in range(n - right))][:n]


def test_drafted_text_is_the_plain_text(any_model: Model) -> None:
    sequence, rng, length = any_model.sequence, random.Random(1), LENGTH
    most = sequence.max_draft
    assert most >= 16
    text, rows = plain_text(sequence, length)
    sequence.clear()
    sequence.extend(PROMPT, n_outputs=1)
    written = [int(sequence.logits(len(PROMPT) - 1).argmax())]
    refused = 0
    while len(written) < length - most - 1:
        drafted = drafts(text, len(written), most, rng)
        before = len(sequence)
        sequence.checkpoint()
        sequence.extend([written[-1], *drafted], n_outputs=1 + len(drafted))
        for i in range(1 + len(drafted)):
            row = sequence.logits(i)
            np.testing.assert_allclose(row, rows[len(written)], rtol=1e-5, atol=TOLERANCE)
            written.append(int(row.argmax()))
            if i == len(drafted) or written[-1] != drafted[i]:
                break
        refused += len(drafted) - i
        sequence.roll_back_to(before + 1 + i)
        assert sequence.tokens == PROMPT + written[:-1]
        assert int(llama.llama_memory_seq_pos_max(llama.llama_get_memory(sequence.context), 0)) + 1 == len(sequence)
        if rng.random() < 0.3:  # passes without a draft come between
            row = sequence.step(written[-1])
            np.testing.assert_allclose(row, rows[len(written)], rtol=1e-5, atol=TOLERANCE)
            written.append(int(row.argmax()))
    assert refused > 20
    assert written == text[: len(written)]


def test_answers_with_drafts(any_model: Model, files: dict[str, Path], reuse: Load) -> None:
    """The writing loop itself, over two turns of a chat, with drafts of all lengths and plain steps between them."""
    sampling = Sampling(temperature=0.0, repeat_penalty=1.5)  # without it they write one letter over and over
    plain = Talker(any_model)
    drafted = Talker(reuse(files[any_model.header.architecture], OPTIONS), costs=FLAT).decide(Wandering(0))
    prompt, refused = [*PROMPT, *PROMPT], 0
    for _ in range(2):
        one = plain.say(prompt, sampling=sampling, max_tokens=80)
        other = drafted.say(prompt, Speculation(drafters=("suffix",)), sampling=sampling, max_tokens=80)
        assert_same(any_model, one, other, sampling)
        refused += other.figures.draft_n - other.figures.draft_n_accepted
        prompt = [*prompt, *one.tokens, *b" and then"]
    assert refused > 0


@pytest.mark.parametrize(("arch", "snapshots"), [("llama", True), ("jamba", True), ("qwen35", True), ("qwen35", False)])
def test_every_pass_is_counted_and_timed(
    arch: Architecture, snapshots: bool, files: dict[str, Path], load: Load, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where accepted tokens are re-evaluated, that reads the weights and takes time like any other pass."""
    if not snapshots:
        monkeypatch.setattr(fit, "COPY_SHARE", 0.0)
    talker = Talker(load(files[arch], OPTIONS), costs=FLAT).decide(Wandering(3))
    clock, decode = [0.0], llama.llama_decode

    def one_second(*of: object) -> int:
        clock[0] += 1.0
        return decode(*of)

    monkeypatch.setattr(llama, "llama_decode", one_second)
    for module in (sequence_module, speculative, speculator):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    records: list[PassRecord] = []
    record = talker.speculator._controller.record
    monkeypatch.setattr(talker.speculator._controller, "record", lambda one: (records.append(one), record(one)))
    sampling = Sampling(temperature=0.0, repeat_penalty=1.5)
    said = talker.say([*PROMPT], Speculation(drafters=("suffix",)), sampling=sampling, max_tokens=80)
    assert said.figures is not None and said.figures.draft_n_accepted < said.figures.draft_n
    assert said.figures.passes == clock[0] - 1.0  # the prompt
    assert 1e3 * said.figures.passes == sum(one.verify_ms + one.rollback_ms for one in records)
    assert said.result.last - said.result.first == said.figures.passes
    assert said.result.overhead_seconds == 0.0
    is_evaluated_again = any(one.again for one in records)
    assert is_evaluated_again == (talker.target.sequence.rollback.kind == "checkpoint")


def test_kind_is_found_by_trying(any_model: Model) -> None:
    sequence, kind = any_model.sequence, KINDS[any_model.header.architecture]  # type: ignore[index]
    assert sequence.rollback.kind == kind
    assert sequence.tokens == []
    assert sequence.is_recurrent == (kind != "exact")
    assert ("Drafting costs more" in " ".join(any_model.info.notes)) == (kind == "checkpoint")


def test_the_longest_draft_is_cut_at_both_ends_and_inside(any_model: Model) -> None:
    sequence = any_model.sequence
    sequence.extend(PROMPT)
    pass_ = [65 + i % 26 for i in range(sequence.max_draft + 1)]
    for kept in (0, 1, 2, len(pass_) // 2, len(pass_) - 1, len(pass_)):
        sequence.clear()
        sequence.extend([*PROMPT, *pass_[:kept]])
        expected = sequence.step(97).copy()
        sequence.clear()
        sequence.extend(PROMPT)
        sequence.checkpoint()
        sequence.extend(pass_)
        sequence.roll_back_to(len(PROMPT) + kept)
        np.testing.assert_allclose(sequence.step(97), expected, atol=TOLERANCE)


def test_stale_snapshots_are_not_used_for_an_edit(bounded: Sequence) -> None:
    """llama.cpp would go back by a few tokens here, to a state of some earlier pass."""
    bounded.extend(PROMPT)
    bounded.step(65)
    bounded.step(66)
    assert not bounded.can_cut(len(PROMPT))
    assert bounded.truncate(len(PROMPT)) == 0
    assert bounded.tokens == []


def test_stop_in_a_drafted_pass_leaves_a_sound_sequence(any_model: Model, abort: AbortFlag) -> None:
    sequence = any_model.sequence
    sequence.extend(PROMPT)
    sequence.checkpoint()
    abort.set()
    with pytest.raises(Aborted):
        sequence.extend([65, 66, 67])
    abort.clear()
    assert sequence.tokens == PROMPT and not sequence.is_broken
    sequence.extend([97], n_outputs=1)
    row = sequence.logits(0).copy()
    sequence.clear()
    sequence.extend([*PROMPT, 97], n_outputs=1)
    np.testing.assert_allclose(row, sequence.logits(len(PROMPT)), atol=TOLERANCE)


@pytest.fixture
def contexts(files: dict[str, Path]) -> Iterator[Callable[..., Sequence]]:
    """Create bare contexts with parameters that `Model` would not choose."""
    made: list[tuple[Sequence, object, object]] = []
    bindings.start()

    def _make(
        arch: Architecture, n_rs_seq: int | None, *, n_ubatch: int = 32, n_ctx: int = 256, swa_full: bool = False
    ) -> Sequence:
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        model = llama.llama_model_load_from_file(str(files[arch]).encode(), params)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_outputs_max = n_ctx, 64, n_ubatch, 32
        params.type_k = params.type_v = 0  # F32
        params.flash_attn_type, params.swa_full = 0, swa_full
        params.n_threads = params.n_threads_batch = 1
        if n_rs_seq is not None:
            request_rollback(params, n_rs_seq)
        context = llama.llama_init_from_model(model, params)
        sequence = Sequence(context, n_vocab=272, abort=AbortFlag())
        made.append((sequence, context, model))
        return sequence

    yield _make
    for sequence, context, model in made:
        sequence.free()
        llama.llama_free(context)
        llama.llama_model_free(model)


def test_without_snapshots_or_a_second_sequence_nothing_is_drafted(contexts: Callable[..., Sequence]) -> None:
    sequence = contexts("mamba", None)
    sequence.rollback = detect_rollback(sequence)
    assert isinstance(sequence.rollback, NoRollback)
    assert sequence.max_draft == 0
    assert "drafting is off" in sequence.rollback.note


@pytest.mark.parametrize(("wanted", "n_ubatch", "got"), [(31, 32, 30), (31, 64, 31), (5, 4, 2)])
def test_snapshots_are_limited_by_the_ubatch(
    contexts: Callable[..., Sequence], wanted: int, n_ubatch: int, got: int
) -> None:
    """One more and llama.cpp aborts the process at the first batch."""
    sequence = contexts("nemotron_h", wanted, n_ubatch=n_ubatch)
    way = detect_rollback(sequence)
    assert isinstance(way, Bounded) and way.max_draft == got
    assert (f" {got} token" in way.note) == (got < 8)
    sequence.extend([65 + i % 26 for i in range(64)])


def test_window_sized_cache_loses_nothing_by_rollbacks(contexts: Callable[..., Sequence]) -> None:
    """A cell is used again when the first token of a pass cannot see it: then no token that is kept or follows can."""
    small, full = contexts("gemma3", None, n_ctx=2048), contexts("gemma3", None, n_ctx=2048, swa_full=True)
    rng = random.Random(1)
    small.extend(PROMPT)
    full.extend(PROMPT)
    while len(full) < 4 * WINDOW:
        pass_ = rng.choices(range(32, 127), k=rng.choice([1, 2, 9, 32]))
        kept = len(full) + rng.randint(0, len(pass_))
        rows = []
        for sequence in (small, full):
            sequence.checkpoint()
            sequence.extend(pass_, n_outputs=len(pass_))
            rows.append(np.stack([sequence.logits(i)[32:127] for i in range(len(pass_))]))
            sequence.roll_back_to(kept)
        np.testing.assert_allclose(rows[0], rows[1], atol=LOST_CELL)
    pos_min = [llama.llama_memory_seq_pos_min(llama.llama_get_memory(one.context), 0) for one in (small, full)]
    assert pos_min[0] > 2 * WINDOW and pos_min[1] == 0


class _Stays(Rollback):
    """Claims to go back and does not."""

    def roll_back_to(self, n: int, marked: int, passes: int) -> int | None:
        return n


class _Renumbers(Rollback):
    """Goes back in the positions only: llama.cpp takes that, and the state still holds what was refused."""

    def roll_back_to(self, n: int, marked: int, passes: int) -> int | None:
        held = llama.llama_memory_seq_pos_max(self._kv_cache, 0) + 1
        llama.llama_memory_seq_add(self._kv_cache, 0, 0, -1, n - held)
        return n


def test_a_way_that_does_not_work_is_found_out(files: dict[str, Path], load: Load) -> None:
    sequence = load(files["mamba"], OPTIONS).sequence
    kv_cache = llama.llama_get_memory(sequence.context)
    for way, works in ((_Stays(kv_cache), False), (_Renumbers(kv_cache), False), (Checkpoint(kv_cache), True)):
        assert can_roll_back(sequence, way) == works
        assert sequence.tokens == []


def _logged(lines: list[str], what: str) -> float:
    """Return the bytes in llama.cpp's `CPU <what> buffer size = 1.25 MiB`, which it rounds to 0.01."""
    sizes = [line.rpartition("=")[2].split()[0] for line in lines if f"{what} buffer size" in line]
    return sum(map(float, sizes)) * 2**20


@pytest.mark.parametrize(("arch", "n_ctx"), [*((arch, 256) for arch in (*KINDS, "gemma3")), ("gemma3", 1024)])
def test_memory_is_what_llama_cpp_says(arch: Architecture, n_ctx: int, load: Load, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "wide-F32.gguf", arch=arch, n_layer=6, n_embd=256, n_ff=256)
    model = load(file, LoadOptions(n_ctx=n_ctx, n_batch=64, n_ubatch=64))
    lines, need = bindings.log.lines(), model.plan.need
    assert need.kv == pytest.approx(_logged(lines, "KV") + _logged(lines, "RS"), abs=0.02 * 2**20)
    compute, estimate = _logged(lines, "compute"), need.compute - fit.PROCESS_BYTES
    assert compute <= estimate <= 1.4 * compute


def test_snapshots_give_way_when_memory_is_short(files: dict[str, Path], load: Load) -> None:
    options = LoadOptions(n_ctx=512, n_batch=64, n_ubatch=64)
    header = read_model(files["nemotron_h"])
    enough = fit.required_memory(header, options, 512, 32, 31).min_bytes
    least = fit.required_memory(header, options, 512, 32, 3).min_bytes
    for available, most in ((enough, 31), (enough - 1, 15), (least, 3)):
        model = load(files["nemotron_h"], options, available=available)
        assert model.plan.n_rs_seq == model.sequence.max_draft == most
