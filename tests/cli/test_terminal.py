"""Tests the command line in a real terminal, where Ctrl+C reaches the worker as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.program import PLAIN
from tests.support.terminal import Terminal

pytestmark = pytest.mark.usefixtures("measured_machine", "one_core")


@pytest.fixture
def asking(slow_model: Path, tmp_path: Path) -> Iterator[Terminal]:
    with closing(Terminal(["ask", "--model", str(slow_model), *PLAIN, "Hello"], home=tmp_path)) as terminal:
        yield terminal


def test_ctrl_c_in_a_terminal_stops_the_answer_and_shows_its_figures(asking: Terminal) -> None:
    asking.wait_until(lambda text: text.count("c") > 20, "the answer")
    asking.press("ctrl+c")
    assert asking.wait_for_end() == 130
    last = asking.raw.decode().strip().splitlines()[-1]
    assert "tok/s" in last and last.endswith(" · stopped")
    assert b"Traceback" not in asking.raw


def test_ctrl_c_while_the_model_loads(asking: Terminal) -> None:
    asking.wait_for("the model")
    asking.press("ctrl+c")
    assert asking.wait_for_end() == 130 and b"Traceback" not in asking.raw


def test_the_progress_line_is_gone_before_the_answer_begins(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ["ask", "--model", str(tiny_model), *PLAIN, "--max-tokens", "8", "Hello"]
    with closing(Terminal(arguments, home=tmp_path)) as terminal:
        assert terminal.wait_for_end() == 0
    answer, summary = terminal.raw.rsplit(b"\x1b[2K", 1)[1].decode().strip().splitlines()
    assert answer and "token limit" in summary


def test_the_app_with_a_draft_model_that_does_not_fit(tiny_model: Path, tmp_path: Path) -> None:
    with closing(Terminal(["--model", "demo", "--draft-model", str(tiny_model)], home=tmp_path)) as terminal:
        assert terminal.wait_for_end() == 12
    assert b"cannot draft for" in terminal.raw
