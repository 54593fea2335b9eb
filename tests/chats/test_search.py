"""Tests what a search marks."""

from __future__ import annotations

import pytest

from cpuchat.chats.store import Matcher


@pytest.mark.parametrize(
    ("text", "wanted", "found"),
    [("나무 너무 나무", "너무", ["너무"]), ("か が", "が", ["が"]), ("Café CAFE", "cafe", ["Café", "CAFE"])],
)
def test_letters_are_told_apart_as_the_index_does(text: str, wanted: str, found: list[str]) -> None:
    assert [text[start:end] for start, end in Matcher(wanted).spans(text)] == found
