"""Tests Markdown to rows: nothing gets lost, whatever is written and however it arrives."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from cpuchat.base.text import clean
from cpuchat.tui.markdown.dialect import MAX_MARKS
from cpuchat.tui.markdown.render import code_blocks, missing, render
from cpuchat.tui.markdown.rows import Line, TextRow, TextStyles, copied_text, to_line, wrap
from cpuchat.tui.markdown.streaming import Stream
from tests.tui.markdown.rendered import chunks, streamed

PALETTE = TextStyles()


def plain(source: str, width: int = 80) -> str:
    return "\n".join(row.text.rstrip() for row in render(source, width, PALETTE))


def lines(source: str, width: int = 80) -> list[Line]:
    return [to_line(row, width, Style()) for row in render(source, width, PALETTE)]


# What must be readable as it was written

KEPT = [
    "std::vector<int> and List<String>",
    "<script>alert(1)</script> <!-- note --> <brr>",
    "<think>hidden</think>",
    "&#27; &#x202e; &nosuchentity; & AT&T",
    "$\\mystery_1 * y_1 * z$ and $HOME/$USER and \\[ \\begin{cases} \\]",
    "$5 and $10",
    "__init__ and __name__",
    "snake_case_name and 2 * 3 * 4",
    "[^1] and a footnote",
    "[ref][missing] and [shortcut]",
    "https://example.com/a_b_c?x=1&copy=2",
    "C:\\Users\\me",
    "a\tb".expandtabs(4),
    '[ref]: http://x.y "Title"\n[^1]: the note\n\nsee [ref]',
    # Marks that are no emphasis.
    "価格*（税込）と",
    "a**(b)**c",
    "2 * 3 * 4",
    "snake_变量_名 与 文件_（终稿）_最新.docx",
    "中文 ** 中文 ** 中文",
    "x🎉**(hi)**x",
    "x⌚**(hi)**x",
]


@pytest.mark.parametrize("text", KEPT, ids=["generics", *(f"kept{number}" for number in range(1, len(KEPT)))])
def test_is_shown_as_written(text: str) -> None:
    assert plain(text) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        # A link shows where it leads.
        ('[here](http://evil.example/ü?a=1&copy=2 "t")', 'here (http://evil.example/ü?a=1&copy=2 "t")'),
        ("[http://same.example](http://same.example)", "http://same.example"),
        ("<http://auto.example/x>", "http://auto.example/x"),
        ("![alt](pic.png)", "[image: alt] (pic.png)"),
        ("[odd](javascript:alert(1))", "odd (javascript:alert(1))"),
        # Lists keep their numbers and tasks.
        ("3. three\n3. again\n10) ten", "3. three\n3. again\n\n10) ten"),
        ("- [ ] open\n- [x] done\n  - deep", "• [ ] open\n• [x] done\n  ◦ deep"),
        # Entities are characters but in code.
        ("&lt;div&gt; &amp; &#35;1 &copy; **&quot;a&quot;**", '<div> & #1 © "a"'),
        ("`&lt;`\n\n```\n&amp;\n```", "&lt;\n\n▎ &amp;"),
        ("[a &amp; b](http://x.y?a=1&amp;b=2)", "a & b (http://x.y?a=1&b=2)"),
        # <br> breaks the line, also in a table.
        ("one <br> two<br/>\nthree `<br>`", "one\ntwo\nthree <br>"),
        ("|a|b|\n|-|-|\n|one<br>two|x|", " a   │ b\n─────┼───\n one │ x\n two │"),
        # Fences, nested and half open, and code by its indent.
        ("````md\n```py\nx\n```\n````", "▎ md\n▎ ```py\n▎ x\n▎ ```"),
        ("```py\ndef f():", "▎ py\n▎ def f():"),
        ("~~~\n\n~~~", "▎"),
        ("```no-such-language {.x}\ncode\n```", "▎ no-such-language {.x}\n▎ code"),
        ("## Keys\n\n        «?»   Show this page", "Keys\n▎     «?»   Show this page"),
    ],
)
def test_markup_becomes_text(source: str, text: str) -> None:
    assert plain(source) == text


def test_markup_becomes_style() -> None:
    (row,) = render("a **b** *c* `d` ~~e~~", 80, PALETTE)
    assert row.text == "a b c d e"
    styles = {text: style for text, style in row.runs}
    assert styles["b"].bold and styles["c"].italic and styles["e"].strike


def test_every_level_of_a_heading_looks_different() -> None:
    looks = [[(text.strip(), str(style)) for text, style in render("#" * n + " Title", 40, PALETTE)[0].runs]
             for n in range(1, 7)]  # fmt: skip
    assert len({str(look) for look in looks}) == 6


@pytest.mark.parametrize("fence", ["diff", "patch", ""])
def test_a_diff_has_colors(fence: str) -> None:
    palette = replace(PALETTE, inserted=Style(color="green"), deleted=Style(color="red"))
    rows = render(f"```{fence}\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old\n+new\n same\n```", 40, palette)
    colors = {text: style.color and style.color.name for row in rows for text, style in row.runs}
    assert (colors["-old"], colors["+new"], colors[" same"]) == ("red", "green", None)
    assert colors["--- a/x"] is colors["+++ b/x"] is None


EMPHASIS = [
    # Chinese, Japanese and Korean have no spaces around emphasis, and punctuation of their own within it.
    pytest.param("**注意：**这很重要", "注意：", "bold", id="colon"),
    pytest.param("**我想做的事。**所以", "我想做的事。", "bold", id="full-stop"),
    pytest.param("**历经10年发展，**a", "历经10年发展，", "bold", id="comma-before-latin"),
    pytest.param("これは**「重要」**です", "「重要」", "bold", id="quotes"),
    pytest.param("**“공개 문서는 점검한다”**는 원칙", "“공개 문서는 점검한다”", "bold", id="particle-after-quote"),
    pytest.param("~~删除（旧）。~~新的", "删除（旧）。", "strike", id="strikethrough"),
    pytest.param("*强调。*后文", "强调。", "italic", id="italic"),
    pytest.param("__注意：__内容", "注意：", "bold", id="underscores"),
    pytest.param('这是**"术语"**吗', '"术语"', "bold", id="straight-quotes"),
    pytest.param("다음은 **`코드`**입니다", "코드", "bold", id="code"),
    pytest.param("中文**[链接](http://a.b)**的", "链接", "bold", id="link"),
    pytest.param("ﾃｽﾄ**｢重要｣**です", "｢重要｣", "bold", id="half-width"),
    pytest.param("\u1112\u1161\u11ab**(a)**\u1100\u1173\u11af", "(a)", "bold", id="separate-jamo"),
    pytest.param("葛\U000e0100**(x)**城", "(x)", "bold", id="variation-selector"),
]


@pytest.mark.parametrize(("source", "marked", "look"), EMPHASIS)
@pytest.mark.parametrize("where", ["{}", "- {}", "| {} |\n|-|\n| x |"], ids=["text", "item", "cell"])
def test_emphasis_beside_cjk_punctuation(source: str, marked: str, look: str, where: str) -> None:
    rows = render(where.format(source), 80, PALETTE)
    assert not re.search(r"[*~_`]", "".join(row.text for row in rows))
    found = {text: style for row in rows for text, style in row.runs}
    assert getattr(found[marked], look)


def test_formulas_and_emphasis_beside_chinese_brackets() -> None:
    (row,) = render(
        "公式（\\(x_2\\)）和\\(y_3\\)、$x_1$，**名称（name）**中文", 80, replace(PALETTE, math=Style(italic=True))
    )
    assert row.text == "公式（\\(x_2\\)）和\\(y_3\\)、$x_1$，名称（name）中文"
    assert [text for text, style in row.runs if style.italic] == ["\\(x_2\\)", "\\(y_3\\)", "$x_1$"]


def test_columns_with_wide_characters_line_up() -> None:
    shown = plain(
        "| 配置 | 论文 (%) | 👩‍💻 |\n|-|-:|-|\n| Vicuna (report) | 79.30 | x |\n| 通义千问 | (无) | ✓ |"
    ).split("\n")
    assert {cell_len(line[:at]) for line in shown for at in [line.find("│"), line.rfind("│")] if at > 0} == {17, 28}


NESTED = [
    # (a document in a fence, its text; what follows it)
    ("```markdown\n# T\n\n```python\nx = 1\n```\n\nmore\n```", "# T\n\n```python\nx = 1\n```\n\nmore"),
    ("```md\n```sh\nls\n```\n```", "```sh\nls\n```"),
    ("~~~markdown\n~~~sh\nls\n~~~\n```\n~~~", "~~~sh\nls\n~~~\n```"),
    ("```markdown\n- a\n   ```sh\n   ls\n   ```\n- b\n    ```c\n    ;\n    ```\n```",
     "- a\n   ```sh\n   ls\n   ```\n- b\n    ```c\n    ;\n    ```"),
    ("```markdown\n````md\n```sh\nls\n```\n````\n```", "````md\n```sh\nls\n```\n````"),
    ("```markdown\n```md\n```sh\nls\n```\n```\n```", "```md\n```sh\nls\n```\n```"),
    ("````markdown\n```sh\nls\n```\n````", "```sh\nls\n```"),
    ("````markdown\n```sh\nls\n````", "```sh\nls"),
    ("```markdown\n```python\n```sh\n```\n```", "```python\n```sh\n```"),
    ("```markdown\nplain\n```", "plain"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("document", "text"), NESTED,
    ids=["python", "only", "tildes", "indented", "longer", "three", "four", "open", "no-document", "plain"],
)  # fmt: skip
@pytest.mark.parametrize("indent", ["", "  "], ids=["text", "item"])
def test_fences_nest_in_a_fenced_document(document: str, text: str, indent: str) -> None:
    source = f"before\n\n{document}\n\nafter **bold**"
    if indent:
        source = "- " + source.replace("\n", f"\n{indent}")
    assert [block.text for block in code_blocks(source)] == [text]
    assert plain(source).split("\n")[-1].strip() == "after bold"


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("```markdown\n# T\n```sh\nls\n```\n\nafter", ["# T\n```sh\nls"]),  # one end: it is the document's
        ("```python\n```sh\nls\n```\nafter", ["```sh\nls"]),  # code has no fences in it
        ("```markdown\na\n```\n\n```sh\nls\n```", ["a", "ls"]),
        ("1. ```markdown\n   ```sh\n   ls\n   ```\nafter\n```", ["```sh\nls", ""]),
        ("```markdown\na\n```\nb\n```\nc\n```\n```", ["a", "c", ""]),
    ],
    ids=["one-end", "code", "after", "list", "no-language"],
)
def test_fences_that_cannot_be_told_to_nest_end_as_in_commonmark(source: str, texts: list[str]) -> None:
    assert [block.text for block in code_blocks(source)] == texts


def test_code_blocks_are_given_as_written() -> None:
    source = "```make\nall:\n\techo *x*\n```\n- item\n  ```\n  y\n  ```\n\n      indented"
    assert [block.text for block in code_blocks(source)] == ["all:\n\techo *x*", "y", "indented"]


# Tables

TABLE = "| Name | Value |\n|:--|--:|\n| a | 1 |\n| long text here | 22 |"


def test_a_table_with_more_cells_than_columns_is_shown_as_written() -> None:
    assert "| x | y | extra | more |" in plain(TABLE + "\n| x | y | extra | more |")


@pytest.mark.parametrize("width", [10, 20, 40, 80])
def test_a_table_fits_any_width_and_breaks_no_number_and_no_short_word(width: int) -> None:
    source = "| A | B | C | D |\n|-|-|-|-|\n| one quantization | 1,646,573,056 | https://example.com/long | 日本語 |"
    rows = render(source, width, PALETTE)
    assert all(cell_len(row.text) <= width for row in rows)
    assert not missing(source, rows)
    words = {word for row in rows for word in row.text.split()}
    assert width < 20 or {"quantization", "1,646,573,056"} <= words


def test_a_long_line_of_code_hangs_behind_its_own_indent() -> None:
    source = "```py\nif x:\n    return some(argument, another, third)\n```"
    assert [row.text for row in render(source, 30, PALETTE)][2:] == [
        "▎     return some(argument,",
        "╎       another, third)",
    ]


# Widths

DOCUMENT = """# Title with **bold**

Some *long* paragraph with `inline code` and a [link](http://example.com/path) that wraps,
日本語のテキストも折り返す, 👩‍💻.

1. one
   - nested with more words than fit on a narrow line
     ```python
     def f(x):
         return "a long string that does not fit into forty columns"
     ```
2. two

> quote
> > deeper

| a | b |
|---|---|
| 1 | two words |

---
~~~
last
"""


@pytest.mark.parametrize("width", [8, 20, 40, 80, 120])
def test_no_row_is_wider_than_asked(width: int) -> None:
    rows = render(DOCUMENT, width, PALETTE)
    deep_inside = 12  # eight columns cannot hold three levels of indentation
    assert all(cell_len(row.text) <= max(width, deep_inside) for row in rows)
    assert not missing(DOCUMENT, rows)


WORDS = st.text(st.sampled_from("ab cdé  日本👩‍💻✌️\u0301(.,/-。、"), max_size=60)


@given(WORDS, st.integers(2, 20))
def test_wrapping_loses_nothing_and_fits(text: str, width: int) -> None:
    text = clean(text)
    rows = wrap(TextRow([(text[:7], Style()), (text[7:], Style(bold=True))]), width)
    assert "".join(row.joint * bool(index) + row.text for index, row in enumerate(rows)).rstrip(" ") == text.rstrip(" ")
    assert all(cell_len(row.text.strip()) <= width for row in rows)


# Copying


def test_copied_text_has_no_wraps_and_no_decoration() -> None:
    source = "some words that wrap\n\n```py\nfirst = 'long line of code that wraps'\nsecond = 2\n```"
    shown = lines(source, 14)
    last = len(shown) - 1
    assert copied_text(shown, (0, 0), (last, 99)) == (
        "some words that wrap\n\n▎ py\nfirst = 'long line of code that wraps'\nsecond = 2"
    )
    start = next(i for i, line in enumerate(shown) if "first" in line.text)
    assert copied_text(shown, (start, 0), (last, 99)) == "first = 'long line of code that wraps'\nsecond = 2"


# Nothing gets lost, whatever is written

PIECES = st.sampled_from(
    [
        "word", "x1", "é", "日本", " ", "  ", "    ", "\n", "\n\n", "\t", "# ", "## ", "- ", "* ", "+ ", "1. ",
        "27) ", "> ", "*", "**", "_", "__", "~~", "`", "``", "```", "```py\n", "~~~", "|", "|-|-|\n",
        "\n|---|---|\n", "[", "](", ")", "![", "]", "](<", ">", "<", "</b>", "<!--", "-->", "<http://x.y>",
        "http://a.b/c", "&amp;", "&#35;", "\\", "\\(", "\\)", "\\[", "\\]", "$", "$$", "$$\n", "---", "===",
        "\n---\n", "[a]: b\n", "[^1]:", "[x] ", "[ ] ", "\"", "'", ":", "<?php", "{", "@",
    ]
)  # fmt: skip
SOURCES = st.lists(PIECES, max_size=30).map("".join)


def word_characters(text: str) -> Counter[str]:
    """Return the text without the letters that become another character."""
    text = text.replace("&amp;", "&").replace("&#35;", "#")
    return Counter(char for char in text if char.isalnum())


@settings(max_examples=40, deadline=None)
@given(SOURCES, st.sampled_from([12, 40, 80]))
def test_every_letter_and_digit_is_shown(source: str, width: int) -> None:
    source = clean(source)
    shown = "".join(row.text for row in render(source, width, PALETTE))
    assert not word_characters(source) - word_characters(shown)


# Texts that took from seconds to minutes; the budget is in characters, so that no clock decides what is shown.

COSTLY = {
    "formulas": "$$a " * 20_000,
    "dollars": "$a" * 20_000,
    "stars": "*a " * 20_000,
    "images": "![a](" * 8_000,
    "lists": "".join("  " * level + "- x\n" for level in range(500)),
    "spaces": "a\n" + " " * 100_000 + "b",
    "accents": "e" + "\u0301" * 20_000 + " end",
    "cell": "|a|\n|-|\n|" + "`$a " * 20_000 + "|",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COSTLY)
@pytest.mark.timeout(180)
def test_costly_text_is_shown_plain_in_time_and_whole(name: str) -> None:
    source = COSTLY[name]
    for width in (24, 80):
        assert not missing(source, render(source, width, PALETTE))
    *_, rows = streamed(Stream(80, PALETTE), chunks(source, len(source) // 20))
    assert not missing(source, rows)


def test_markup_beyond_the_budget_is_text_and_what_follows_is_rendered() -> None:
    rows = [row.text for row in render("**a** " * (MAX_MARKS // 4 + 1) + "\n\n**b**", 80, PALETTE)]
    assert rows[0].startswith("**a** **a**")
    assert rows[-1] == "b"


def test_no_row_holds_thousands_of_characters_in_one_cell() -> None:
    rows = render(COSTLY["accents"], 40, PALETTE)
    assert max(len(row.text) for row in rows) <= 16 * 40
    assert "".join(row.text for row in rows).count("\u0301") == 20_000


@pytest.mark.parametrize("source", [">" * 300 + " deep", "- " * 200 + "deep", "[" * 3000 + "deep", "`" * 999])
def test_hostile_nesting_is_shown(source: str) -> None:
    assert not missing(source, render(source, 80, PALETTE))
