"""Tests what the agreement of two answers is made of, with predictions that are given."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cpuchat.compare.agreement import Agreement, ScoredToken, Written, score_answers, spans
from cpuchat.present import compare
from cpuchat.protocol.messages import Score, ScoredRows, TokensScored

N_VOCAB = 100
PROMPT = (1, 2, 3)


@pytest.fixture(autouse=True)
def blocks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict two tokens in a pass."""
    monkeypatch.setattr("cpuchat.compare.agreement.rows_of_block", lambda n_vocab: 2)


class Sides:
    """Two workers that answer from a table: token -> (p of its writer, p of the other, rank with the other)."""

    def __init__(self, table: dict[int, tuple[float, float, int]]) -> None:
        self.commands: list[tuple[int, Score]] = []
        self._table = table

    async def run(self, side: int, command: Score) -> TokensScored:
        self.commands.append((side, command))
        assert Path(command.file).exists()
        tokens = command.tokens[-command.n :]
        found = [self._table.get(token, (0.9, 0.9, 1)) for token in tokens]
        p, q, ranks = (np.array(column) for column in zip(*found, strict=True))
        rows = ScoredRows(
            kld=floats(np.full(len(tokens), 0.5)), base_nll=floats(-np.log(p)), other_nll=floats(-np.log(q)),
            same_top=floats(ranks == 1), ranks=ranks.astype("<i4").tobytes(),
            tops=tuple(f" top{token}" for token in tokens), tops_p=floats(np.full(len(tokens), 0.6)),
        )  # fmt: skip
        return TokensScored(request_id=1, compared=(rows,) * len(command.bases))


def floats(values: np.ndarray) -> bytes:
    return values.astype("<f4").tobytes()


def written(tokens: list[int], text: str, prompt: tuple[int, ...] = PROMPT) -> Written:
    """An answer of which each piece between two bars is the text of a token."""
    pieces = text.split("|")
    assert len(pieces) == len(tokens)
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return Written(prompt, tokens, "".join(pieces), ends)


A = written([10, 11, 12, 13, 14], "One| wo|rd| more| here")
B = written([10, 11, 22, 23], "One| wo|ol| sock")


async def agreement(table: dict[int, tuple[float, float, int]], a: Written = A) -> Agreement:
    return await score_answers((a, B), N_VOCAB, Sides(table).run)


async def test_a_shared_beginning_is_read_once_and_compared_in_both_directions() -> None:
    sides, shares = Sides({}), list[float]()
    found = await score_answers((A, B), N_VOCAB, sides.run, tell=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1
    assert [side for side, _ in sides.commands] == [0, 1] * 4
    assert [(len(c.tokens), c.n, c.bases) for side, c in sides.commands if side] == [
        (5, 2, ("file", "own")),
        (7, 2, ("file",)),
        (8, 1, ("file",)),
        (7, 2, ("own",)),
    ]
    assert {(c.n_prompt, c.n_ctx) for _, c in sides.commands} == {(3, 8)}
    assert [len(one.tokens) for one in found.answers] == [5, 4]


async def test_only_whole_blocks_are_shared_unless_the_texts_are_the_same() -> None:
    b = written([10, 11, 12, 23], "One| wo|rd| sock")
    sides = Sides({})
    await score_answers((A, b), N_VOCAB, sides.run)
    assert [c.n for side, c in sides.commands if side and len(c.bases) == 2] == [2]
    same = Sides({})
    found = await score_answers((A, A), N_VOCAB, same.run)
    assert [c.n for side, c in same.commands if side] == [2, 2, 1]
    assert found.answers[0] == found.answers[1]


async def test_a_word_agrees_if_all_its_tokens_do_and_one_that_matters_is_one_place() -> None:
    found = await agreement({12: (0.8, 0.02, 5), 13: (0.7, 0.3, 2)})
    a = found.answers[0]
    assert [token.step for token in a.tokens] == ["agrees", "agrees", "matters", "close", "agrees"]
    assert a.n_words == 4 and a.words.value == 0.5
    (place,) = a.places
    assert (place.token, place.character, place.before, place.text) == (2, 6, "One wo", "rd")
    assert (place.p, place.p_other, place.top) == (0.8, 0.02, " top12")
    assert a.same_top == 0.6 and a.kld == 0.5
    assert a.ppl == pytest.approx((0.9**3 * 0.8 * 0.7) ** (-1 / 5), rel=1e-5)
    assert compare.agreement(found, ("Q8_0", "Q4_K_M")).startswith(
        "Q4_K_M would have written 50 % of Q8_0's words (15–85); 1 place matters."
    )
    assert compare.places(found, ("Q8_0", "Q4_K_M")) == ["One wo ▸ “rd” 80 % · Q4_K_M “top12” 60 %, “rd” 2 %"]


async def test_several_tokens_of_a_word_that_matter_are_one_place_and_none_is_said_so() -> None:
    found = await agreement({11: (0.9, 0.01, 9), 12: (0.9, 0.01, 9)})
    assert [place.token for place in found.answers[0].places] == [1]
    found = await agreement({13: (0.7, 0.3, 2)})
    assert compare.agreement(found, ("A", "B")).endswith("the texts part at token 4, a close call.")
    found = await agreement({})
    assert re.fullmatch(r"B would have written 100 % of A's words \(\d+–100\)\.", compare.agreement(found, ("A", "B")))


def scored(start: int, end: int, p_other: float, rank: int) -> ScoredToken:
    return ScoredToken(start, end, 0.9, p_other, rank, 0.1, " x", 0.5)


def test_spans_are_relative_to_the_part_that_is_shown_and_joined() -> None:
    tokens = (scored(0, 4, 0.5, 2), scored(4, 9, 0.2, 2), scored(9, 12, 0.9, 1), scored(12, 15, 0.05, 3))
    assert spans(tokens, 0, 15) == [(0, 9, "close"), (12, 15, "matters")]
    assert spans(tokens, 6, 14) == [(0, 3, "close"), (6, 8, "matters")]  # the reasoning before is shown elsewhere
    assert spans(tokens, 9, 12) == []
