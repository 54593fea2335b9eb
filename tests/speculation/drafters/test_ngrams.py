"""Tests the index of n-grams against a search through the text."""

from __future__ import annotations

import random
import tracemalloc
from array import array

from hypothesis import given
from hypothesis import strategies as st

from cpuchat.speculation.drafters.suffix import NOWHERE, SIZES, NgramIndex, following

# Few different tokens, so that much repeats, and one of each kind of extreme id.
texts = st.lists(st.sampled_from([0, 1, 2, 262_143, 2**31 - 1]), max_size=40)
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


@given(st.one_of(texts, few))
def test_finds_the_occurrence_before(text):
    check(indexed(text), text)


@given(st.lists(st.one_of(texts, few), max_size=8), st.data())
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
