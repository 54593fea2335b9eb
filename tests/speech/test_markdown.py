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
        ("41.3 tok/s", "41.3 tokens per second"),
        ("≈ 5 µs", "about 5 microseconds"),
        ("28 KB/token", "28 kilobytes per token"),
        ("-5 and −3", "minus 5 and minus 3"),
        ("10^6 and 2^2", "10 to the power of 6 and 2 squared"),
        ("3e-5", "3 times 10 to the minus 5"),
        ("x ≤ 5, y >= 2", "x at most 5, y at least 2"),
        ("a 16-bit value", "a 16 bit value"),
        ("4k context", "4 thousand context"),
        ("10 - 3 = 7", "10 minus 3 equals 7"),
        ("(a + b) - 2", "(a plus b) minus 2"),
        ("x = 7/2, but 50/50", "x equals 7 over 2, but 50/50"),
        ("~5 s in ~/models", "about 5 seconds in /models"),
        ("C# and F#", "C sharp and F sharp"),
    ],
)
def test_numbers_units_and_operators_are_read_out(text: str, said: str) -> None:
    assert spoken_inline(text) == said


@pytest.mark.parametrize(
    "text",
    [
        "the 1990s", "a 7B model", "1,234,567", "2024-05-01", "12:30", "$5 and $10", "DDR5-4800", "llama.cpp",
        "Call 555-1234", "(555) 123-4567", "3/4 of it", "24/7", "5-7 items", "10 - 20 minutes", "2²",
        # Vowel signs, marks and the ZWNJ of other scripts.
        "हिन्दी में।", "สวัสดีครับ", "نمی\u200cخواهم", "\u05e9\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd",
    ],
)  # fmt: skip
def test_what_a_voice_reads_itself_stays(text: str) -> None:
    assert spoken_inline(text) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("**Bold**, *it*, __b__ and ~~old~~", "Bold, it, b and old"),
        ("[the docs](https://x.y/z(1)) and ![a chart](c.png)", "the docs and Image: a chart"),
        ("see https://www.example.com/a?b=c.", "see example dot com."),
        ("<https://example.org>", "example dot org"),
        ("`read_file()` of `a.py`", "read file of a dot py"),
        ("Q4_K_M in snake_case", "Q4 K M in snake case"),
        ("2 * 3", "2 times 3"),
        ("a<br>b &amp; c", "a b and c"),
        ("a footnote[^1]", "a footnote"),
        ("$x^2 + y$", "x squared plus y"),
        (r"where \(\frac{a}{b} \le 2\)", "where Formula"),
        ("🎉 Done ✅ 👍🏽 1️⃣", "Done 1"),
        ("e\u0301", "é"),
        ("input/output", "input output"),
        ("A → B", "A to B"),
        (r"\*literal\*", "literal"),
        (f"a data:image/png;base64,{'iVBORw0KGgo' * 30}== b", "a b"),
        (f"see https://example.com/{'a' * 200} there", "see example dot com there"),
    ],
)
def test_markup_is_not_read(text: str, said: str) -> None:
    assert spoken_inline(text) == said


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
