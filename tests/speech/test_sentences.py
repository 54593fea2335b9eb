from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpuchat.speech.sentences import MAX_CHARS, SentenceSplitter

ANSWER = """# Why is decoding slow?

Each weight is read once per token, e.g. 2.7 GB at 63 GB/s. Dr. Smith agrees! So **does J. Doe.** Does it?
It goes on here
with a soft wrap. See [the docs. Really](https://x.y/z) and `a. b`.

- First item
- [x] second item. With two sentences.
  continued here
1. Numbered
2) Other

```python
def f(): pass
# not. spoken. At all
```

```npm install x``` does it. Then:

1. ```bash
   pip install y. Now!
   ```
- ~~~
  code
  ~~~
> ```python
> quoted. Code.
> ```
> After it.
> - ```
>   z
>   ```

Read on.

| model | tok/s |
|---|--:|
| Qwen 1.5B | 31.0 |

> Quoted text. More of it.
> - quoted item

Heading two
---

$$
E = mc^2
$$
$$x$$ is the energy.
\\[ a
b \\], where it ends.
Inline \\(x^2\\) math. 日本語です。次の文。

The law is $$
F = ma
$$, as known. It
costs $$. Really.

$$ is not closed. Skipped

- Price: $$
- item

    that goes on. Here
1. It is:
   $$
   y
   $$

Indented:

    def f(): pass. Not read

    # Nor. This
and after it. In a table:

model | tok/s, e.g. of
--- | --:
Qwen 1.5B | 31.0. No rule

***

Last one without an end
"""
SENTENCES = [
    "Why is decoding slow?",
    "Each weight is read once per token, e.g. 2.7 gigabytes at 63 gigabytes per second.", "Dr. Smith agrees!",
    "So does J. Doe.", "Does it?", "It goes on here with a soft wrap.", "See the docs.", "Really and a b.",
    "First item.", "Done: second item.", "With two sentences.", "continued here.", "1: Numbered.", "2: Other.",
    "Code block, python.", "npm install x does it.",
    "Then:", "Code block, bash.", "Code block.", "Code block, python.", "After it.", "Code block.",
    "Read on.",
    "Table: model, tokens per second.", "Qwen 1.5B, 31.0.",
    "Quoted text.", "More of it.", "quoted item.",
    "Heading two.", "Formula.", "Formula is the energy.", "Formula.", "where it ends.", "Inline x squared math.",
    "日本語です。", "次の文。",
    "The law is Formula, as known.",
    "It costs $$.", "Really.", "Formula.",
    "Price: $$.", "item.", "that goes on.", "Here.",
    "1: It is:", "Formula.",
    "Indented:", "Code block.", "and after it.",
    "In a table:", "Table: model, tokens per second, e.g. of.", "Qwen 1.5B, 31.0.", "No rule.",
    "Last one without an end.",
]  # fmt: skip


def spoken(*pieces: str) -> list[str]:
    splitter = SentenceSplitter()
    return [sentence for piece in pieces for sentence in splitter.feed(piece)] + splitter.flush()


def test_markdown_becomes_sentences() -> None:
    assert spoken(ANSWER) == SENTENCES


@given(st.lists(st.integers(1, 40), max_size=200))
@example([1, 1, 1, 1, 34, 40, 40])
def test_any_division_gives_the_same_sentences(lengths: list[int]) -> None:
    pieces, at = [], 0
    for length in lengths:
        pieces.append(ANSWER[at : at + length])
        at += length
    assert spoken(*pieces, ANSWER[at:]) == SENTENCES


@given(st.text(alphabet="aZ1 .!?`*_[]()|#>-$\\\n~:,", max_size=200), st.integers(1, 7))
def test_any_markdown_is_divided_into_short_pieces(text: str, step: int) -> None:
    said = spoken(*(text[at : at + step] for at in range(0, len(text), step)))
    assert all(one.strip() == one and 0 < len(one) <= MAX_CHARS + 2 for one in said)


def test_a_sentence_is_complete_with_the_first_word_of_the_next() -> None:
    splitter = SentenceSplitter()
    assert splitter.feed("One is done.") == splitter.feed(" ") == splitter.feed("Now") == []
    assert splitter.feed(" ") == ["One is done."]
    assert splitter.flush() == ["Now."]
    assert splitter.feed("一つです。") == [] and splitter.feed("次") == ["一つです。"]


def test_code_is_announced_when_it_begins_and_never_read() -> None:
    splitter = SentenceSplitter()
    assert splitter.feed("Like this:\n\n```sh\n") == ["Like this:", "Code block, sh."]
    assert splitter.feed("rm -rf. Now! Really?\n\n# Heading\n") == []
    assert splitter.feed("```\nDone. But ") == ["Done."]


@given(st.integers(1, 60))
def test_long_sentences_are_divided_the_same_way_at_commas(step: int) -> None:
    text = "words, and `more` of them [here] " * 14 + "so. It ends. " + "plain words of a text " * 30 + "end. Next one"
    found = spoken(*(text[at : at + step] for at in range(0, len(text), step)))
    assert found == spoken(text) and len(found) > 6 and all(len(one) <= MAX_CHARS + 2 for one in found)


@pytest.mark.parametrize(
    "text",
    [" " * 20_000 + "x", "|" + " " * 20_000 + "x\n", "# " + "x" * 20_000, "[" * 20_000, "-" * 20_000,
     "`" * 20_000 + "x`"],
)  # fmt: skip
def test_very_long_lines_are_divided_and_never_stall(text: str) -> None:
    assert all(len(one) < 5 * MAX_CHARS for one in spoken(*(text[at : at + 500] for at in range(0, len(text), 500))))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("run", "size"), [("!", 100_000), (" ", 8), ("> ", 8)])
def test_long_runs_take_linear_time(run: str, size: int) -> None:
    """The regular expressions, and the second look at a line with each piece, took minutes for such runs."""
    text = (run * 100_000)[:100_000]
    splitter = SentenceSplitter()
    found = [sentence for at in range(0, len(text), size) for sentence in splitter.feed(text[at : at + size])]
    found += [*splitter.feed("\n\nThe end."), *splitter.flush()]
    assert found == ["The end."]
