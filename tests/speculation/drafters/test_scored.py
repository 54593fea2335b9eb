"""Tests what of a drafter's proposals is verified, and what is scored."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from cpuchat.speculation.drafters.drafter import Proposal
from cpuchat.speculation.drafters.suffix import SHADOW_TOKENS, NgramIndex, ScoredDrafter, SuffixDecoding


class Scripted(SuffixDecoding):
    """Predicts what `script` says about each position of the text."""

    def __init__(self, index: NgramIndex, script: dict[int, list[int]]) -> None:
        super().__init__(index)
        self.index, self.script = index, script

    def propose(self, max_n: int) -> Proposal:
        tokens = self.script.get(len(self.index), [])[:max_n]
        return Proposal("suffix", tokens, [1 + i % 7 for i in range(len(tokens))])


def begun(script: dict[int, list[int]], worth: Callable[[Proposal], int] = lambda proposal: 0) -> ScoredDrafter:
    index = NgramIndex()
    return ScoredDrafter(index, Scripted(index, script), worth)


def test_what_is_worth_a_pass_is_proposed_and_not_scored():
    scored = begun({0: [1, 2, 3]}, worth=lambda proposal: 2)
    assert scored.propose(8) == Proposal("suffix", [1, 2], [1, 2])
    scored.append([1])
    assert not scored.propose(8) and scored.take_scores() == []


def test_what_is_not_verified_is_scored_up_to_the_first_wrong_token():
    scored = begun({0: [1, 2, 3, 4], 3: [7]})
    assert not scored.propose(8)
    scored.append([1])
    scored.append([2, 9, 4])
    assert scored.take_scores() == [([1], [True]), ([2, 3], [True, False])]
    assert scored.take_scores() == []


def test_a_prediction_is_scored_without_being_asked_for():
    scored = begun({0: list(range(1, 20))})
    scored.append(range(1, 20))
    assert scored.take_scores() == [([1 + i % 7 for i in range(SHADOW_TOKENS)], [True] * SHADOW_TOKENS)]


tokens = st.integers(0, 1)
scripts = st.dictionaries(st.integers(0, 40), st.lists(tokens, min_size=1, max_size=SHADOW_TOKENS), max_size=30)


@given(scripts, st.lists(st.lists(tokens, min_size=1, max_size=6), max_size=12), st.booleans())
def test_scores_are_what_verifying_each_prediction_would_tell(script, pieces, asked):
    text = [token for piece in pieces for token in piece]
    scored = begun(script)
    for piece in pieces:
        if asked:
            scored.propose(SHADOW_TOKENS)
        scored.append(piece)
    expected: list[tuple[int, bool]] = []
    position, free_at = 0, 0
    for piece in pieces:
        predicted = script.get(position, [])
        if position >= free_at and predicted:
            right = 0
            following = text[position : position + len(predicted)]
            while right < len(following) and following[right] == predicted[right]:
                right += 1
            verdicts = [True] * right + ([False] if right < len(following) else [])
            expected += [(1 + i % 7, verdict) for i, verdict in enumerate(verdicts)]
            free_at = position + len(verdicts)
        position += len(piece)
    found = [pair for buckets, rights in scored.take_scores() for pair in zip(buckets, rights, strict=True)]
    assert found == expected
