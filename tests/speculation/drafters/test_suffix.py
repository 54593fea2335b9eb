"""Tests suffix decoding: its index and its drafts against a search through the text, and what is scored."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.speculation.drafters.drafter import MAX_DEPTH, N_BUCKETS, Proposal
from cpuchat.speculation.drafters.suffix import (
    MAX_CANDIDATES,
    NOWHERE,
    SHADOW_TOKENS,
    SIZES,
    NgramIndex,
    ScoredDrafter,
    SuffixDecoding,
    following,
)

# Few different tokens, so that much repeats, and one of each kind of extreme id.
extreme_texts = st.lists(st.sampled_from([0, 1, 2, 262_143, 2**31 - 1]), max_size=40)
few = st.lists(st.integers(0, 1), max_size=60)


def indexed(text: list[int]) -> NgramIndex:
    index = NgramIndex()
    index.extend(text)
    return index


def ends(text: list[int], size: int, gram: list[int]) -> list[int]:
    """Return where `gram` ends in `text`."""
    return [end for end in range(size - 1, len(text)) if text[end + 1 - size : end + 1] == gram]


def check(index: NgramIndex, text: list[int]) -> None:
    """Assert that the index holds what a search through `text` finds."""
    assert index.text.tolist() == text
    for size, previous in zip(SIZES, index.previous, strict=True):
        for end in range(len(text)):
            gram = text[max(0, end + 1 - size) : end + 1]
            before = [other for other in ends(text, size, gram) if other < end] if len(gram) == size else []
            assert previous[end] == max(before, default=NOWHERE)
    for end, (source, run) in enumerate(zip(index.source, index.run, strict=True)):
        assert source < end
        assert run <= 0 or text[source + 1 - run : source + 1] == text[end + 1 - run : end + 1]
        if index.previous[0][end] != NOWHERE:
            assert run > 0, "an n-gram of the longest size is copied from somewhere"
    fresh = indexed(text)
    assert (index.source, index.run, index.changed) == (fresh.source, fresh.run, fresh.changed)


@given(st.one_of(extreme_texts, few))
def test_finds_the_occurrence_before(text):
    check(indexed(text), text)


@given(st.lists(st.one_of(extreme_texts, few), max_size=8), st.data())
def test_a_text_that_grows_and_is_edited_is_as_if_indexed_at_once(parts, data):
    index, text = NgramIndex(), []
    for part in parts:
        if data.draw(st.booleans()):
            text = text[: data.draw(st.integers(0, len(text)))] + part
            index.set_text(text)
        else:
            text = text + part
            index.extend(part)
        check(index, text)


def test_of_several_sources_the_next_one_is_followed():
    """A repeated part of a file that is copied: its first copy is nearer, its second place in the file is right."""
    part, words = list(range(20, 30)), list(range(100, 140))
    file = [*words[:10], *part, *words[10:20], *part, *words[20:30]]
    index = indexed([*file, 1, *words[:10], *part, *words[10:20], 2, *part])
    assert index.source[-1] == len(words[:20]) + 2 * len(part) - 1


def test_a_copy_ends_when_its_source_is_left():
    index = indexed([*range(100, 140), 1, *range(100, 110)])
    assert index.source[-1] == 9
    index.extend(range(200, 240))
    assert index.source[-1] == NOWHERE


@given(few.filter(lambda text: len(text) > 1), st.data(), st.integers(0, 40))
def test_what_follows_goes_round_past_the_end(text, data, n):
    end = data.draw(st.integers(0, len(text) - 2))
    copy = list(text)
    for i in range(n):
        copy.append(copy[end + 1 + i])
    assert following(array("i", text), end, n).tolist() == copy[end + 1 : end + 1 + n]


def test_memory_for_a_long_chat():
    source = random.Random(0)
    text = [source.randrange(150_000) for _ in range(32_000)]
    tracemalloc.start()
    try:
        index = indexed(text)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(index) == 32_000
    assert used < 12e6


texts = st.lists(st.integers(0, 3), max_size=80)


def suffix(text: list[int]) -> SuffixDecoding:
    return SuffixDecoding(indexed(text))


def continuations(text: list[int], size: int, n: int) -> list[list[int]]:
    """Return the `n` tokens after every earlier occurrence of the last `size`, latest first."""
    found = []
    for start in range(len(text) - size - 1, -1, -1):
        if text[start : start + size] == text[len(text) - size :]:
            copy = list(text)
            for i in range(n):
                copy.append(copy[start + size + i])
            found.append(copy[len(text) :])
    return found


def most_frequent(ways: list[list[int]]) -> list[int]:
    """Return the most frequent next token, the latest on a tie, and what all that continue with it have in common."""
    counts = Counter(way[0] for way in ways)
    token = max(counts, key=lambda token: counts[token])
    ways = [way for way in ways if way[0] == token]
    agreed = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*ways, strict=True))
    return [tokens[0] for tokens in agreed]


@given(texts, st.integers(1, 12))
def test_a_proposal_is_the_most_frequent_way_on_from_one_of_the_matches(text, n):
    index = indexed(text)
    tokens = SuffixDecoding(index).propose(n).tokens
    assert len(tokens) <= n
    paths = [most_frequent(ways[:MAX_CANDIDATES]) for size in SIZES if (ways := continuations(text, size, n))]
    is_copy = bool(text) and index.source[-1] != NOWHERE
    assert is_copy or not tokens or any(path[: len(tokens)] == tokens for path in paths)
    # A match that was always followed by the same token is not passed over in silence.
    if any(len({way[0] for way in continuations(text, size, 1)}) == 1 for size in SIZES):
        assert tokens


@given(st.lists(st.integers(0, 1000), min_size=40, max_size=80, unique=True), st.integers(8, 28), st.integers(1, 12))
def test_a_copy_continues_as_its_source(text, length, n):
    assert suffix([*text, 2000, *text[:length]]).propose(n).tokens == text[length : length + n]


SOURCE = list(range(100, 140))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([*SOURCE[:10], 7], SOURCE[11:15]),  # perhaps a replacement
        ([*SOURCE[:10], 7, 111], SOURCE[12:16]),  # it was one
        ([*SOURCE[:10], 7, 8, 9, 110, 111], SOURCE[12:16]),  # an insertion
        ([*SOURCE[:10], 114, 115], SOURCE[16:20]),  # a part was left out
        ([*SOURCE[:10], 7, 111, 112, 113, 8, 115], SOURCE[16:20]),  # two changes close to each other
    ],
)
def test_a_copy_goes_on_behind_a_change(written, expected):
    assert suffix([*SOURCE, 1, 2, 3, *written]).propose(4).tokens == expected


@pytest.mark.parametrize("old", [[5], [5, 6]])
@pytest.mark.parametrize("new", [[7], [7, 8, 9]])
def test_what_was_replaced_once_is_replaced_again(old, new):
    before, after = SOURCE[:10], SOURCE[10:20]
    text = [*before, *old, *after, *old, *SOURCE[20:30], 1, 2, 3]
    copy = [*before, *new, *after]
    assert suffix([*text, *copy]).propose(8).tokens[: len(new) + 2] == [*new, *SOURCE[20:22]]
    # Where it stays, it is taken for unchanged from then on.
    again = [*text, *copy, *old, *SOURCE[20:30], 4, *after]
    assert suffix(again).propose(len(old)).tokens == old


@given(texts, st.integers(0, 100))
def test_as_many_grades_as_tokens(text, n):
    proposal = suffix(text).propose(n)
    assert proposal.drafter == "suffix"
    assert len(proposal.buckets) == len(proposal.tokens) <= min(n, MAX_DEPTH)
    assert all(1 <= given < N_BUCKETS for given in proposal.buckets)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20, unique=True), st.integers(1, 31))
def test_periodic_text_goes_on_with_its_period(period, n):
    assert suffix(period * 40).propose(n).tokens == [period[i % len(period)] for i in range(n)]


@pytest.mark.parametrize("text", [[], [5], [5, 6], [1, 2, 3, 4, 5]])
def test_nothing_to_say(text):
    assert suffix(text).propose(8).tokens == []


JUST_NOW = [5, 6, 7, 8, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the more frequent continuation wins against the latest
        ([1, 2, 3, 10, 1, 2, 3, 11, 1, 2, 3, 12, 1, 2, 4, 13, 1, 2], 3),
        # the longer match against the frequent one: after "2 3" alone mostly 9 came, after all of this 4
        ([*JUST_NOW, 4, 4, 4, *[2, 3, 9] * 3, *JUST_NOW], 4),
        # an ambiguous long match gives way: "0 1 2" was followed by 3, 4 and 5; "1 2" by 8, very often
        ([0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 5, *[1, 2, 8, 8] * 12, 0, 1, 2], 8),
    ],
)
def test_which_match_decides(text, expected):
    assert suffix(text).propose(1).tokens == [expected]


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
