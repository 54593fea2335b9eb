"""Tests the draft model: what it says, and that it computes no token twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.engine.drafting.draft_model import DraftModel
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.protocol.messages import LoadOptions
from cpuchat.speculation.drafters.drafter import UNKNOWN
from tests.engine.conftest import Load
from tests.support.pair_files import draft_token_table
from tests.support.pairs import N_VOCAB, chain, pair_files

TABLE = draft_token_table(N_VOCAB, 0.5).tolist()
TEXT = [300 + (7 * i) % 900 for i in range(40)]
LETTERS = list(b"a text of letters that nobody has written before")


@pytest.fixture(scope="module")
def draft_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair_files(tmp_path_factory.mktemp("pair"), 0.5)[1]


@pytest.fixture
def small(load: Load, draft_file: Path) -> Model:
    """Return a draft model whose next token is the entry of the last one in `TABLE`; context of 256 tokens."""
    return load(draft_file, LoadOptions(n_ctx=256, n_batch=64, n_ubatch=32))


@pytest.fixture
def draft(small: Model) -> DraftModel:
    return DraftModel(small.sequence, N_VOCAB)


def taken(evaluated: list[int]) -> int:
    """Return the tokens evaluated since the last call."""
    n = sum(evaluated)
    evaluated.clear()
    return n


def test_drafts_what_its_model_says(draft: DraftModel) -> None:
    draft.begin_answer(TEXT)
    for n in (1, 3, 31):
        proposal = draft.propose(n)
        assert proposal.drafter == "draft"
        assert proposal.tokens == chain(TEXT[-1], n, TABLE)
        assert proposal.buckets == [UNKNOWN] * n
    assert not draft.propose(0)
    draft.begin_answer([])
    assert not draft.propose(4) and draft.n_unread == 0


def test_no_token_is_evaluated_twice(draft: DraftModel, small: Model, evaluated: list[int]) -> None:
    draft.begin_answer(TEXT)
    assert draft.n_unread == 40
    drafted = draft.propose(4).tokens
    assert taken(evaluated) == 40 + 3
    # All four are right, and the target adds one: its own and the last drafted token are new.
    draft.append([*drafted, 777])
    assert draft.n_unread == 2
    drafted = draft.propose(4).tokens
    assert drafted == chain(777, 4, TABLE) and taken(evaluated) == 2 + 3
    # Two are right.
    draft.append([*drafted[:2], 888])
    assert draft.n_unread == 1
    assert draft.propose(4).tokens == chain(888, 4, TABLE) and taken(evaluated) == 1 + 3
    # None is.
    draft.append([999])
    assert draft.n_unread == 1
    assert draft.propose(1).tokens == chain(999, 1, TABLE) and taken(evaluated) == 1
    assert small.sequence.tokens == [*TEXT, *chain(TEXT[-1], 4, TABLE), 777, *chain(777, 2, TABLE), 888, 999]


def test_an_edited_text_keeps_what_is_common(draft: DraftModel, evaluated: list[int]) -> None:
    draft.begin_answer(TEXT)
    draft.propose(3)
    taken(evaluated)
    edited = [*TEXT[:25], 1500, 1501]
    draft.begin_answer(edited)
    assert draft.n_unread == 2
    assert draft.propose(3).tokens == chain(1501, 3, TABLE) and taken(evaluated) == 2 + 2
    # The same text again: only its last token gives the logits.
    draft.begin_answer(edited)
    assert draft.propose(3).tokens == chain(1501, 3, TABLE) and taken(evaluated) == 1 + 2
    draft.begin_answer(TEXT[:10])
    assert draft.propose(1).tokens == chain(TEXT[9], 1, TABLE) and taken(evaluated) == 1
    draft.begin_answer([1600, 1601])
    assert draft.n_unread == 2 and draft.propose(1).tokens == chain(1601, 1, TABLE)


def test_a_text_longer_than_its_context(draft: DraftModel, small: Model, evaluated: list[int]) -> None:
    text = [300 + (11 * i) % 1200 for i in range(900)]
    draft.begin_answer(text)
    for i in range(120):
        drafted = draft.propose(8).tokens
        assert drafted == chain(text[-1], 8, TABLE)
        held = small.sequence.tokens
        assert 100 < len(held) <= small.sequence.n_ctx
        assert held == [*text, *drafted[:-1]][-len(held) :]
        written = [*drafted[: i % 9], 300 + i]
        draft.append(written)
        text += written
    assert taken(evaluated) < 120 * (8 + 2) + 8 * 128  # the window is filled anew now and then, not each time


def test_score_is_what_it_would_have_drafted(load: Load, tiny_model: Path) -> None:
    """Held against `propose` at every place, with a model whose opinion depends on the whole text."""
    asked, told = (DraftModel(load(tiny_model).sequence, 272) for _ in range(2))
    asked.begin_answer(LETTERS[:1])
    for _ in range(3):  # a text with some tokens that it would have drafted
        asked.append(asked.propose(4).tokens)
        asked.append(LETTERS[:9])
    text = list(asked._text)
    opinions = []
    for i in range(1, len(text)):
        told.begin_answer(text[:i])
        opinions.append(told.propose(1).tokens[0] == text[i])
    assert True in opinions and False in opinions
    told.begin_answer([0])
    told.propose(1)  # nothing of the text is left
    told.begin_answer(text)
    assert told.score(10) == opinions[:10]
    assert told.n_unread == len(text) - 10
    assert told.score(1000) == opinions[10:]
    assert told.n_unread == 1 and told.score(5) == []


def test_never_drafts_what_the_target_does_not_know(load: Load, tiny_model: Path) -> None:
    whole, cut = load(tiny_model), load(tiny_model)
    everything = DraftModel(whole.sequence, whole.vocab.n_tokens)
    everything.begin_answer(LETTERS)
    said = everything.propose(12).tokens
    n_vocab = max(said)
    draft = DraftModel(cut.sequence, n_vocab)
    draft.begin_answer(LETTERS)
    drafted = draft.propose(12).tokens
    assert max(drafted) < n_vocab
    at = said.index(n_vocab)
    assert drafted[:at] == said[:at] and drafted[at] != said[at]
    for one, n_right in ((everything, len(said)), (draft, at)):
        one.begin_answer([0])
        one.propose(1)
        one.begin_answer([*LETTERS, *said, 65])
        one.read(len(LETTERS) - 1)
        right = one.score(len(said))
        assert all(right[:n_right]) and all(right) is (n_right == len(said))


def test_a_stop_leaves_it_usable(draft: DraftModel, abort: AbortFlag, evaluated: list[int]) -> None:
    draft.begin_answer(TEXT)
    for work in (lambda: draft.propose(4), lambda: draft.read(20), lambda: draft.score(20)):
        abort.set()
        with pytest.raises(Aborted):
            work()
        abort.clear()
        assert draft.n_unread == 40
    draft.propose(4)
    draft.append([700, 701, 702])
    abort.set()
    with pytest.raises(Aborted):
        draft.propose(4)
    abort.clear()
    taken(evaluated)
    assert draft.propose(4).tokens == chain(702, 4, TABLE)
    assert taken(evaluated) <= 3 + 3
