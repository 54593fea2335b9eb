"""Tests free drafters together: who is asked, what is scored."""

from __future__ import annotations

from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from cpuchat.protocol.timings import DrafterName
from cpuchat.speculation.drafters.cascade import SHADOW_TOKENS, Cascade
from cpuchat.speculation.drafters.drafter import Proposal
from cpuchat.speculation.drafters.ngrams import NgramIndex


class Scripted:
    """Predicts what `script` says about each position of the text."""

    def __init__(self, name: DrafterName, script: dict[int, list[int]]) -> None:
        self.name: Final = name
        self.script = script
        self.index = NgramIndex()

    def propose(self, max_n: int) -> Proposal:
        tokens = self.script.get(len(self.index), [])[:max_n]
        return Proposal(self.name, tokens, [1 + i % 7 for i in range(len(tokens))])


def all_of_it(proposal: Proposal) -> int:
    return len(proposal)


def nothing(proposal: Proposal) -> int:
    return 0


def begun(drafters: list[Scripted], worth=all_of_it) -> Cascade:
    index = NgramIndex()
    for drafter in drafters:
        drafter.index = index
    return Cascade(index, drafters, worth)


def test_the_first_drafter_worth_a_pass_is_taken():
    suffix, lookup = Scripted("suffix", {0: [1, 2]}), Scripted("lookup", {0: [3, 4, 5], 1: [6]})
    cascade = begun([suffix, lookup])
    assert cascade.propose(8) == Proposal("suffix", [1, 2], [1, 2])
    cascade.append([1])
    assert cascade.propose(8) == Proposal("lookup", [6], [1])
    cascade.append([1])
    assert not cascade.propose(8)


def test_the_next_one_is_taken_when_the_first_is_worth_nothing():
    drafters = [Scripted("suffix", {0: [1]}), Scripted("lookup", {0: [2]})]
    cascade = begun(drafters, worth=lambda proposal: len(proposal) if proposal.drafter == "lookup" else 0)
    assert cascade.propose(8).tokens == [2]
    cascade.append([1])
    assert cascade.take_scores() == [("suffix", [1], [True])], "what is verified is not scored here"


def test_what_is_not_verified_is_scored_up_to_the_first_wrong_token():
    cascade = begun([Scripted("suffix", {0: [1, 2, 3, 4], 3: [7]})], worth=nothing)
    assert not cascade.propose(8)
    cascade.append([1])
    cascade.append([2, 9, 4])
    assert cascade.take_scores() == [("suffix", [1], [True]), ("suffix", [2, 3], [True, False])]
    assert cascade.take_scores() == []


def test_a_prediction_is_scored_without_being_asked_for():
    cascade = begun([Scripted("lookup", {0: list(range(1, 20))})], worth=nothing)
    cascade.append(range(1, 20))
    assert cascade.take_scores() == [("lookup", [1 + i % 7 for i in range(SHADOW_TOKENS)], [True] * SHADOW_TOKENS)]


tokens = st.integers(0, 1)
scripts = st.dictionaries(st.integers(0, 40), st.lists(tokens, min_size=1, max_size=SHADOW_TOKENS), max_size=30)


@given(scripts, st.lists(st.lists(tokens, min_size=1, max_size=6), max_size=12), st.booleans())
def test_scores_are_what_verifying_each_prediction_would_tell(script, pieces, asked):
    text = [token for piece in pieces for token in piece]
    cascade = begun([Scripted("suffix", script)], worth=nothing)
    for piece in pieces:
        if asked:
            cascade.propose(SHADOW_TOKENS)
        cascade.append(piece)
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
    scored = [pair for _, buckets, rights in cascade.take_scores() for pair in zip(buckets, rights, strict=True)]
    assert scored == expected
