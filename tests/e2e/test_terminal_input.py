"""Tests the whole program with what terminals send besides plain keys: it types, pastes, quits, and nothing ends it."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.test_endings import answering, opened
from tests.support.terminal import Terminal

TYPED: tuple[tuple[str | bytes, str], ...] = (
    ("a\x1b[97;1:1ub", "aab"),
    ("a\x1b[97:65;2ub\x1b[97;1:3u\x1b[57441;2:3u", "aAb"),
    ("a\x1b[1;1:3A\x1b[1114112u\x1b[55296u\x1b[48;0;0;0;0tb", "ab"),
    (b"caf\xe9 ole", "caf\ufffd ole"),
    (b"a\x1b[MC\xff\xfe\x1b[MC\xc3\xa9b", "ab"),
    (b"\x1b[200~gr\xfc\xdfe\x1b[201~", "gr\ufffd\ufffde"),
    ("a\x1bP>|XTerm(370)\x1b\\\x1b]4;1;rgb:0/0/0\x07\x1b[<35;9999;9999Mb", "ab"),
    ("a\x1b[48;30;100;0;0t\x1b[<35;5;5Mb", "ab"),
)
LINES = ("one\x1b\rtwo", "one\x1b[27;2;13~two", "one\x1b[13;3utwo", "one\x1b[13;2utwo")
CLEAR = "\x1b[1;5F" + "\x7f" * 40


def field(terminal: Terminal) -> list[str]:
    """Return the lines of the message field; none in the middle of a redrawing."""
    rows = terminal.text.splitlines()
    top = max((at for at, row in enumerate(rows) if "─ Message ─" in row), default=None)
    if top is None:
        return []
    column = rows[top].index("╭─ Message")
    return [line for row in rows[top + 1 : -2] if (line := row[column:].strip("│ "))]


def test_what_terminals_send_is_text_or_a_key_or_nothing_and_ctrl_q_quits_in_every_layout(tmp_path: Path) -> None:
    with answering("An answer.") as url, opened("--server", url, home=tmp_path) as terminal:
        terminal.wait_for("Enter sends")
        for sent, shown in TYPED:
            terminal.process.send(sent)
            terminal.type(".")
            terminal.wait_until(lambda _, shown=shown: field(terminal) == [f"{shown}."], ascii(sent))
            terminal.type(CLEAR)
        for sent in LINES:
            terminal.type(f"{sent}.")
            terminal.wait_until(lambda _: field(terminal) == ["one", "two."], ascii(sent))
            terminal.type(CLEAR)
        terminal.type("\x1b[200~a paste without its end")
        terminal.wait_until(lambda _: field(terminal) == ["a paste without its end"], "the paste")
        terminal.type("\x1b[27;5;99~")
        terminal.wait_for("Ctrl+C again quits.")
        terminal.type("\x1b[1081;5u")
        assert terminal.wait_for_end() == 0


def test_what_was_typed_before_the_terminal_is_set_up_is_sent(tmp_path: Path) -> None:
    with answering("An answer.") as url, opened("--server", url, home=tmp_path) as terminal:
        terminal.type("One\nand two\r")
        terminal.wait_for("An answer.")
        assert "One" in terminal.text and "and two" in terminal.text
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
