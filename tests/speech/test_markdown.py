"""Tests what is read of a line of Markdown."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.base.text import is_safe
from cpuchat.speech.sentences import SentenceSplitter, spoken_inline


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("47 of 63 GB/s (75 %)", "47 of 63 gigabytes per second (75 percent)"),
        ("1.6× faster, or 2x", "1.6 times faster, or 2 times"),
        ("41.3 tok/s, ≈ 5 µs", "41.3 tokens per second, about 5 microseconds"),
        ("28 KB/token", "28 kilobytes per token"),
        ("-5 and 2^2, not x ≤ 5", "minus 5 and 2 squared, not x at most 5"),
        ("~5 s in ~/models", "about 5 seconds in /models"),
        ("**Bold**, *it*, __b__ and ~~old~~ F#", "Bold, it, b and old F sharp"),
        ("[the docs](https://x.y/z(1)) and ![a chart](c.png)", "the docs and Image: a chart"),
        ("see https://www.example.com/a?b=c.", "see example dot com."),
        ("`read_file()` of `a.py`", "read file of a dot py"),
        ("a<br>b &amp; c[^1]", "a b and c"),
        ('See <a href="https://x.y/z">the docs</a>, <h2>all</h2> if a <b and c> d', "See the docs, all if a b and c d"),
        ("$x^2 + y$", "x squared plus y"),
        (r"where \(\frac{a}{b} \le 2\)", "where Formula"),
        ("🎉 Done ✅ 👍🏽 1️⃣", "Done 1"),
        ("input/output A → B", "input output A to B"),
        (f"a data:image/png;base64,{'iVBORw0KGgo' * 30}== b", "a b"),
        (f"see https://example.com/{'a' * 200} there", "see example dot com there"),
    ],
)
def test_units_are_words_and_markup_is_not_read(text: str, said: str) -> None:
    assert spoken_inline(text) == said


@pytest.mark.parametrize(
    "text",
    [
        "the 1990s", "a 7B model", "1,234,567", "2024-05-01", "12:30", "$5 and $10", "DDR5-4800", "llama.cpp",
        "3/4 of it", "5-7 items", "हिन्दी में।", "สวัสดีครับ", "نمی\u200cخواهم",
    ],
)  # fmt: skip
def test_what_a_voice_reads_itself_stays(text: str) -> None:
    assert spoken_inline(text) == text


@given(st.text(max_size=300))
def test_any_text_gives_one_safe_line_without_markup(text: str) -> None:
    said = spoken_inline(text)
    assert "\n" not in said
    assert not set(said) & set("*#<>[]{}`|\\")
    assert is_safe([said])


@pytest.mark.parametrize("n_characters", [500, 5000])
def test_an_embedded_image_is_not_spelled_out(n_characters: int) -> None:
    splitter = SentenceSplitter()
    text = f"Look: ![a chart](data:image/png;base64,{'QUJD' * (n_characters // 4)})\n\nDone."
    said = [one for part in re.findall(".{1,7}", text, re.DOTALL) for one in splitter.feed(part)] + splitter.flush()
    assert "QUJDQUJD" * 10 not in "".join(said) and len("".join(said)) < 200 and said[-1] == "Done."
