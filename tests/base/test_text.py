"""Nothing that a model writes may steer the terminal."""

from __future__ import annotations

import itertools
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.base.text import Cleaner, clean, is_safe

HOSTILE = st.text(
    st.one_of(
        st.sampled_from(
            "\x00\x07\x08\t\n\x0b\x0c\r\x1b\x7f\x80\x85\x9b\x9d\u2028\u202e\u2066\u200b\u200d\ufe0f\ufeff[]0;ab日👩"
        ),
        st.characters(),
    )
)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x1b]52;c;aGVsbG8=\x1b\\", "␛]52;c;aGVsbG8=␛\\"),
        ("\x9b2J", "‹U+009B›2J"),
        ("a\x00b\x7fc", "a␀b␡c"),
        ("one\r\ntwo\rthree", "one\ntwo␍three"),
        ("if \u202eesle\u202c", "if ‹U+202E›esle‹U+202C›"),
        ("a\u2066b\u2069", "a‹U+2066›b‹U+2069›"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("line\u2028break", "line\nbreak"),
        ("lone \ud800 half", "lone \ufffd half"),
        ("👩‍💻 ✌️ ❤️‍🔥 می‌خواهم क्‍ष", "👩‍💻 ✌️ ❤️‍🔥 می‌خواهم क्‍ष"),
        ("a\u200db \u200d 👩\u200d x\ufe0f\u200d日", "ab  👩 x日"),
        ("tab\tand\nline", "tab\tand\nline"),
    ],
)
def test_what_is_shown_instead(raw: str, shown: str) -> None:
    assert clean(raw) == shown


@given(HOSTILE)
def test_no_control_character_is_left(text: str) -> None:
    shown = clean(text)
    assert all(unicodedata.category(char) not in ("Cc", "Cs") or char in "\n\t" for char in shown)
    assert not any(char in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069" for char in shown)
    assert is_safe([shown])


@given(st.text())
def test_printable_text_is_kept(text: str) -> None:
    printable = "".join(char for char in text if unicodedata.category(char)[0] not in "CZ")
    assert clean(printable) == printable


@given(HOSTILE, st.lists(st.integers(0, 60)))
def test_any_cutting_gives_the_same(text: str, cuts: list[int]) -> None:
    cleaner = Cleaner()
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [cleaner.feed(text[a:b]) for a, b in itertools.pairwise(edges)]
    assert "".join(parts) + cleaner.flush() == clean(text)
