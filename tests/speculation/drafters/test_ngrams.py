"""Tests the index of n-grams against a search through the text."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from cpuchat.prefix import common_prefix
from cpuchat.speculation.drafters.ngrams import NOWHERE, NgramIndex

SIZES = (1, 2, 3, 5)
# Few different tokens, so that much repeats, and one of each kind of extreme id.
texts = st.lists(st.sampled_from([0, 1, 2, 262_143, 2**31 - 1]), max_size=40)
changes = st.lists(st.one_of(texts, st.integers(0, 60)), max_size=8)


def naive(text: list[int], size: int) -> list[int]:
    """Return where the n-gram that ends at each position ended before."""
    grams = [tuple(text[i + 1 - size : i + 1]) if i + 1 >= size else None for i in range(len(text))]
    return [
        max((j for j in range(i) if gram is not None and grams[j] == gram), default=NOWHERE)
        for i, gram in enumerate(grams)
    ]


def check(index: NgramIndex, text: list[int]) -> None:
    """Assert that the index equals one built from `text` at once."""
    assert index.text.tolist() == text
    fresh = NgramIndex(SIZES)
    fresh.extend(text)
    for size in SIZES:
        assert index.previous[size].tolist() == naive(text, size)
        assert index.key(size) == fresh.key(size)
        # Also what is found from outside, by key: nothing of the removed tokens is left.
        assert index._last[size] == fresh._last[size]
    assert index.match() == fresh.match()


@given(texts)
def test_finds_the_occurrence_before(text):
    index = NgramIndex(SIZES)
    index.extend(text)
    check(index, text)


@given(changes)
def test_any_order_of_appending_and_truncating_is_as_if_built_anew(changes):
    index, text = NgramIndex(SIZES), []
    for change in changes:
        if isinstance(change, int):
            index.truncate(change)
            text = text[:change]
        else:
            index.extend(change)
            text = text + change
        check(index, text)


@given(texts, texts, texts)
def test_begin_with_another_text_is_as_if_built_anew(shared, a, b):
    index = NgramIndex(SIZES)
    index.set_text(shared + a)
    index.set_text(shared + b)
    check(index, shared + b)


def test_begin_does_not_index_the_shared_part_again():
    shared = list(range(2000))
    index = NgramIndex((2,))
    index.set_text([*shared, 1, 2, 3])
    before = index.previous[2]
    index.set_text([*shared, 4, 5])
    assert index.previous[2] is before, "the index was made anew"
    assert index.text.tolist() == [*shared, 4, 5]


@given(texts, texts)
def test_common_prefix(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@given(texts, texts)
def test_keys_lead_into_another_index(a, b):
    here, there = NgramIndex(SIZES), NgramIndex(SIZES)
    here.extend(a)
    there.extend(b)
    for size in SIZES:
        key = here.key(size)
        if key is None:
            assert len(a) < size
            continue
        ends = [i for i in range(size - 1, len(b)) if b[i + 1 - size : i + 1] == a[-size:]]
        assert there.last(size, key) == max(ends, default=NOWHERE)


def test_memory_per_token_and_size():
    tracemalloc.start()
    index = NgramIndex((2, 3))
    index.extend(range(10_000))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 10_000 * 2 * 40 < used < 10_000 * 2 * 200
