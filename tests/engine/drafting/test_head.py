"""A model that drafts with its own head: the text is that of plain decoding, the acceptance that of the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cpuchat.base.errors import ModelUnsupported
from cpuchat.engine.drafting.head import Head
from cpuchat.engine.drafting.speculator import set_up_speculation
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.models.gguf.header import read_model
from cpuchat.models.heads import included_layers, kind_of
from cpuchat.protocol.messages import LoadModel, Sampling, Speculation
from tests.engine.conftest import Load
from tests.support.head_model import HybridShape, write_eagle_pair, write_head_model
from tests.support.pair_files import draft_token_table, next_token_table
from tests.support.pairs import N_VOCAB, OPTIONS, Talker, assert_same
from tests.support.tiny_gguf import write_tiny_gguf

PROMPT = list(range(300, 340))


class HeadTalker(Talker):
    """A model that drafts with its own head."""

    def __init__(self, target: Model, head: Path | None = None) -> None:
        super().__init__(target)
        header = target.header if head is None else read_model(head)
        self.loaded = target.open_head(header, kind_of(header) or "mtp", lambda *_: None)
        self.sequence = self.loaded.sequence
        self.head = Head(self.sequence, target.sequence, target.vocab.n_tokens)
        self.use(self.head)

    def close(self) -> None:
        self.loaded.free()


@pytest.fixture
def talk(load: Load, tmp_path: Path) -> Iterator[Callable[..., HeadTalker]]:
    talkers: list[HeadTalker] = []

    def _talk(alpha: float, **shape: object) -> HeadTalker:
        path = write_head_model(tmp_path / f"head-{alpha}-{len(talkers)}.gguf", alpha, **shape)  # type: ignore[arg-type]
        options = msgspec.structs.replace(OPTIONS, draft_path=str(path))
        talkers.append(HeadTalker(load(path, options), shape.get("head_path")))  # type: ignore[arg-type]
        return talkers[-1]

    yield _talk
    for talker in talkers:
        talker.close()


def drafts(depth: int) -> Speculation:
    return Speculation(drafters=("draft",), depth=depth)


@pytest.mark.parametrize("depth", [1, 4, 15])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_text_and_acceptance(talk: Callable[..., HeadTalker], alpha: float, depth: int) -> None:
    model = talk(alpha)
    plain = model.say(PROMPT, max_tokens=60)
    drafted = model.say(PROMPT, drafts(depth), max_tokens=60)
    assert drafted.tokens == plain.tokens and drafted.held == plain.held
    table = draft_token_table(N_VOCAB, alpha).tolist()
    right = [table[token] == after for token, after in pairwise(plain.tokens)]
    accepted = at = 0
    while at < 59:
        n = min(depth, 58 - at)
        run = next((i for i, ok in enumerate(right[at : at + n]) if not ok), n)
        accepted, at = accepted + run, at + run + 1
    assert drafted.figures is not None and drafted.figures.draft_n_accepted == accepted


def test_it_drafts_the_same_after_rejections_as_from_the_whole_text(talk: Callable[..., HeadTalker]) -> None:
    model = talk(0.5, weight=0.5)
    said = model.say(PROMPT, drafts(4), max_tokens=20)
    text = [*PROMPT, *said.tokens]
    model.head.append(text[len(model.head._text) :])
    drafted = model.head.propose(3)
    row = model.sequence.logits(-1).copy()
    target = model.target.sequence
    target.clear()
    model.sequence.clear()
    fresh = Head(model.sequence, target, N_VOCAB)
    target.extend(text[:-1], n_outputs=1)
    fresh.begin_answer(text)
    assert fresh.propose(3).tokens == drafted.tokens
    np.testing.assert_allclose(model.sequence.logits(-1), row, atol=1e-3)


def test_edited_continued_and_restored_chats(talk: Callable[..., HeadTalker]) -> None:
    model, alone = talk(0.8), talk(0.8)

    def same(prompt: list[int], max_tokens: int = 24) -> list[int]:
        plain = alone.say(prompt, max_tokens=max_tokens)
        drafted = model.say(prompt, drafts(4), max_tokens=max_tokens)
        assert drafted.tokens == plain.tokens
        assert drafted.figures is not None and drafted.figures.draft_n_accepted
        return [*prompt, *drafted.tokens]

    first = same(PROMPT)
    second = same([*first, 400, 401])  # the next turn
    same([*first[:30], 500, 501, 502])  # an edited message
    same(list(range(600, 1000)))  # longer than the states that are kept
    model.say(second[:-1], max_tokens=1)
    state = model.target.sequence.state()
    tokens = list(model.target.sequence.tokens)
    same([700, 701])
    assert model.target.sequence.set_state(tokens, state)
    same([*second, 402])


def test_nothing_is_drafted_from_the_hidden_states_of_another_text(talk: Callable[..., HeadTalker]) -> None:
    model, alone = talk(0.8), talk(0.8)
    model.say(PROMPT, drafts(4), max_tokens=24)
    tokens, state = list(model.target.sequence.tokens), model.target.sequence.state()
    own = model.sequence.tokens.copy(), model.sequence.state()
    model.say(list(range(600, 1000)), max_tokens=1)  # longer
    assert model.target.sequence.set_state(tokens, state) and model.sequence.set_state(*own)
    model.head.begin_answer(tokens)
    assert not model.head.propose(4).tokens
    assert (model.head.read(9), model.head.score(9)) == (0, [])
    longer = [*tokens, 402, 403]
    drafted = model.say(longer, drafts(4), max_tokens=24)
    assert drafted.tokens == alone.say(longer, max_tokens=24).tokens
    assert drafted.figures is not None and drafted.figures.draft_n_accepted
    assert model.sequence.tokens == model.target.sequence.tokens  # what was restored is gone on with


def test_it_drafts_an_answer_of_which_the_model_evaluates_nothing_anew(talk: Callable[..., HeadTalker]) -> None:
    """The prompt of a plain answer is asked again: its last row of logits is kept, and no hidden state."""
    model = talk(0.8)
    plain = model.say(PROMPT, max_tokens=24)
    for _ in range(3):
        drafted = model.say(PROMPT, drafts(4), max_tokens=24)
        assert drafted.tokens == plain.tokens
    assert drafted.figures is not None and drafted.figures.draft_n_accepted


@pytest.mark.parametrize("how", ["read", "score"])
def test_it_goes_on_with_what_it_still_knows_after_it_was_off_for_long(load: Load, tmp_path: Path, how: str) -> None:
    path = write_head_model(tmp_path / "long.gguf", 1.0)
    options = msgspec.structs.replace(OPTIONS, n_ctx=2048, draft_path=str(path))
    model = HeadTalker(load(path, options))
    model.say(PROMPT, max_tokens=1)
    model.head.begin_answer(PROMPT)
    written = [*range(300, 1000), *range(300, 1000)]
    for token in written:
        model.target.sequence.step(token)
    model.head.append([*written, 500])
    getattr(model.head, how)(len(written))
    assert model.head.propose(2).tokens[0] == next_token_table(N_VOCAB)[500]
    assert len(model.sequence) < len(written)  # what is further back was not read with the states of other tokens
    model.close()


def test_a_sampled_answer_is_that_without_drafts(talk: Callable[..., HeadTalker]) -> None:
    model = talk(0.7, weight=0.3)
    sampling = Sampling(temperature=1.0, seed=7)
    plain = model.say(PROMPT, sampling=sampling, max_tokens=80)
    drafted = model.say(PROMPT, drafts(3), sampling=sampling, max_tokens=80)
    assert_same(model.target, plain, drafted, sampling)


def test_a_head_in_a_file_of_its_own(talk: Callable[..., HeadTalker], tmp_path: Path) -> None:
    apart, inside = talk(0.6, head_path=tmp_path / "mtp-model.gguf"), talk(0.6)
    one, other = (model.say(PROMPT, drafts(4), max_tokens=60) for model in (apart, inside))
    assert one.tokens == other.tokens
    assert one.figures.draft_n_accepted == other.figures.draft_n_accepted > 0


def test_of_several_mtp_layers_the_first_drafts_one_token(
    talk: Callable[..., HeadTalker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings, "n_layer_nextn", lambda model: 2)
    model = talk(1.0)
    plain, drafted = model.say(PROMPT, max_tokens=41), model.say(PROMPT, drafts(4), max_tokens=41)
    assert drafted.tokens == plain.tokens
    assert drafted.figures is not None and drafted.figures.draft_n == drafted.figures.passes == 20


def test_a_model_with_more_mtp_layers_than_the_engine_drafts_with_answers_without(load: Load, tmp_path: Path) -> None:
    path = write_head_model(tmp_path / "two.gguf", 1.0, shape=HybridShape(n_mtp=2))
    model = load(path, msgspec.structs.replace(OPTIONS, draft_path=str(path)))
    setup = set_up_speculation(
        model, LoadModel(path=str(path), cpus=(), options=model.options), 8 << 30, _ignore, AbortFlag()
    )
    assert setup.draft is None
    assert any("one MTP layer of qwen35, not with 2" in note and "--server" in note for note in model.info.notes)
    assert model.sequence.step(300).argmax() == next_token_table(N_VOCAB)[300]
    setup.free()


def test_a_model_whose_mtp_layers_were_left_out_is_refused_by_what_is_missing(load: Load, tmp_path: Path) -> None:
    path = write_head_model(tmp_path / "left-out.gguf", 1.0, left_out=True)
    assert not included_layers(read_model(path))
    with pytest.raises(ModelUnsupported, match=r"lacks the tensor blk\.2"):
        load(path)


def _ignore(*_: object) -> None:
    """Take the progress of a load."""


@pytest.mark.parametrize("n_said", [0, 1200], ids=["all tokens", "few tokens"])
def test_an_eagle_head(load: Load, tmp_path: Path, n_said: int) -> None:
    write_eagle_pair(tmp_path / "model.gguf", tmp_path / "eagle3-model.gguf", 0.7, n_said=n_said)
    model = HeadTalker(load(tmp_path / "model.gguf", OPTIONS), tmp_path / "eagle3-model.gguf")
    plain = model.say(PROMPT, max_tokens=60)
    table, twice = next_token_table(N_VOCAB), draft_token_table(N_VOCAB, 0.7)
    text = [*PROMPT, *plain.tokens]
    right = [
        twice[table[text[i - 2]]] == text[i] and (not n_said or (text[i] < n_said and not text[i] % 2))
        for i in range(len(PROMPT), len(text))
    ]
    for depth in (1, 4):
        drafted = model.say(PROMPT, drafts(depth), max_tokens=60)
        assert drafted.tokens == plain.tokens and drafted.held == plain.held
        accepted = at = 0
        while at < 58:
            accepted, at = accepted + right[at + 1], at + 1 + right[at + 1]
        assert drafted.figures is not None and drafted.figures.draft_n_accepted == accepted
        assert drafted.figures.draft_n > 25 * depth  # drafts are as long as they may be
    model.close()


def test_it_reads_nothing_with_the_hidden_states_of_what_was_there_before_an_answer_beside_others(
    load: Load, tmp_path: Path
) -> None:
    """Passes for several answers at once, of which it learns nothing, may have written another text meanwhile."""
    write_eagle_pair(tmp_path / "model.gguf", tmp_path / "eagle3-model.gguf", 1.0)
    options = msgspec.structs.replace(OPTIONS, parallel=2)
    model = HeadTalker(load(tmp_path / "model.gguf", options), tmp_path / "eagle3-model.gguf")
    passes = model.target.passes
    model.say([*PROMPT, *range(500, 560)], drafts(4), max_tokens=24)
    edited = [*PROMPT[:20], *range(700, 740)]
    passes.begin_beside()
    beside = model.say(edited, drafts(4), max_tokens=24)
    passes.end_beside()
    assert beside.figures is not None and not beside.figures.draft_n
    drafted = model.say([*edited, *beside.tokens, 402], drafts(1), max_tokens=24)
    assert drafted.figures is not None and drafted.figures.draft_n_accepted > 10
    assert len(model.sequence) <= 25  # it begins behind what was evaluated beside others
    model.close()


def test_a_head_of_latent_attention_and_experts(load: Load, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", arch="deepseek2", n_layer=3, gain=3.0)
    model = HeadTalker(load(path, msgspec.structs.replace(OPTIONS, draft_path=str(path))))
    prompt = [ord(letter) for letter in "a head that is not trained is wrong, and the text is the same"]
    plain = model.say(prompt, max_tokens=40)
    assert_same(model.target, plain, model.say(prompt, drafts(3), max_tokens=40))
    model.close()
