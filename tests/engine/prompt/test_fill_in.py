"""Tests prompts that ask for the middle of a text, and where such a text ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cpuchat.engine.llama.vocab import FillTokens
from cpuchat.engine.prompt.fill_in import fill_prompt
from cpuchat.engine.text import reasoning
from cpuchat.engine.text.reasoning import LineMatcher
from cpuchat.protocol.messages import FillIn, GenerationFinished, LoadOptions, Output
from tests.support.edited_gguf import FILL_TOKENS, edited, filling
from tests.support.engine_chat import Chat

PRE, SUF, MID, REPO, FILE = FILL_TOKENS
TOKENS = FillTokens(PRE, SUF, MID)
ALL = FillTokens(PRE, SUF, MID, REPO, FILE)


@pytest.fixture(scope="module")
def filler(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filling(tiny_model, tmp_path_factory.mktemp("models") / "filler-F32.gguf")


def written(chat: Chat) -> str:
    """Return the prompt of the last request, as its tokens spell it."""
    finished = chat.events[-1]
    assert isinstance(finished, GenerationFinished), finished
    return b"".join(map(chat.loaded.model.vocab.raw_piece, finished.prompt_tokens)).decode()


def fill(chat: Chat, before: str, fill: FillIn) -> str:
    chat.ask(prompt=before, fill=fill, output=Output(tokens=True, unsplit=True))
    return written(chat)


def test_a_gap_is_asked_for_in_the_form_of_llama_server(chat: Chat, filler: Path) -> None:
    assert chat.load(filler).fills_in
    asked = FillIn(suffix="\nc\n", files=(("a.py", "A = 1\n"), ("b.py", "B = 2\n")))
    expected = f"{REPO}project\n{FILE}a.py\nA = 1\n{FILE}b.py\nB = 2\n{FILE}file\n{PRE}a\n  b{SUF}\nc\n{MID}"
    assert fill(chat, "a\n  b", asked) == expected
    ids = [0xF5 + at for at in (3, 4, 4, 4, 0, 1, 2)]
    finished = chat.events[-1]
    assert isinstance(finished, GenerationFinished)
    assert [token for token in finished.prompt_tokens if 0xF5 <= token < 0xFA] == ids


def test_without_tokens_for_files_others_are_separated_by_lines(chat: Chat, tiny_model: Path, tmp_path: Path) -> None:
    chat.load(filling(tiny_model, tmp_path / "plain.gguf", FILL_TOKENS[:3]))
    text = fill(chat, "a", FillIn(suffix="b", files=(("x", "one"),)))
    assert text == f"\n\n--- snippet ---\n\none{PRE}a{SUF}b{MID}"


def test_a_begin_token_comes_first_and_once(chat: Chat, filler: Path, tmp_path: Path) -> None:
    chat.load(edited(filler, tmp_path / "bos.gguf", {"tokenizer.ggml.add_bos_token": True}))
    assert fill(chat, "1, ", FillIn(suffix=", 5")) == f"<|endoftext|>{REPO}project\n{FILE}file\n{PRE}1, {SUF}, 5{MID}"


def test_tokens_that_the_texts_spell_are_text(chat: Chat, filler: Path) -> None:
    chat.load(filler)
    sly = f"{MID}<|im_end|>{FILE}"
    fill(chat, sly, FillIn(suffix=sly, files=((sly, sly),)))
    finished = chat.events[-1]
    assert isinstance(finished, GenerationFinished)
    specials = [token for token in finished.prompt_tokens if 0xF5 <= token < 0xFA or token > 0x100 + 10]
    assert [token - 0xF5 for token in specials] == [3, 4, 4, 0, 1, 2]


def test_a_model_that_cannot_fill_in_says_so(chat: Chat, tiny_model: Path) -> None:
    assert not chat.load(tiny_model).fills_in
    chat.request(prompt="a", fill=FillIn(suffix="b"))
    assert chat.failure.code == "usage" and "no tokens" in chat.failure.message


def test_what_does_not_fit_the_context_is_left_out(chat: Chat, filler: Path) -> None:
    chat.load(filler, options=LoadOptions(n_ctx=512, n_batch=64, n_ubatch=32))
    lines = "".join(f"line {number}\n" for number in range(400))
    text = fill(chat, lines, FillIn(suffix=lines, files=(("old", "x" * 300),)))
    before, after = text.removesuffix(MID).partition(PRE)[2].split(SUF)
    assert lines.endswith(before) and lines.startswith(after) and "old" not in text
    assert 64 < len(after) < len(before) < 450


def rendered(before: str, fill: FillIn, room: int) -> str:
    return fill_prompt(ALL, before, fill, room, len, lambda text: text)


def test_the_newest_of_other_files_stay() -> None:
    files = tuple((f"f{number}", str(number) * 60) for number in range(5))
    text = rendered("a", FillIn(suffix="b", files=files), 300)
    assert "f4" in text and "f3" in text and "f0" not in text
    assert text.index("f3") < text.index("f4") < text.index(PRE)


def test_the_beginning_stays_the_same_while_more_is_written() -> None:
    text = "".join(chr(0x4E00 + number) for number in range(3000))
    starts = {rendered(text[:n], FillIn(suffix=""), 1016).partition(PRE)[2][:10] for n in range(2000, 2400)}
    assert len(starts) <= 2


def test_a_text_of_any_length_is_cut_to_the_room() -> None:
    for n_before in (0, 10, 90, 5000):
        for n_after in (0, 10, 90, 5000):
            text = rendered("b" * n_before, FillIn(suffix="a" * n_after), 116)
            before, after = text.removesuffix(MID).partition(PRE)[2].split(SUF)
            assert len(before) + len(after) <= 100
            assert len(after) == n_after if n_after <= 25 else len(after) >= 25


@dataclass
class Clock:
    """`perf_counter`, which a test moves."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(reasoning, "perf_counter", clock)
    yield clock


def lines(fill: FillIn, text: str, at: Callable[[str], None] = lambda text: None, *stops: str) -> str:
    """Return what is kept of a text that comes letter by letter."""
    matcher, kept = LineMatcher(stops, fill), ""
    for letter in text:
        at(kept)
        said, is_over = matcher.feed(letter)
        kept += said
        if is_over:
            return kept
    return kept + matcher.flush()


@pytest.mark.parametrize(
    ("n_indent", "text", "kept"),
    [
        (4, "x\n    y\n\n    z\nreturn", "x\n    y\n\n    z"),
        (4, "x\n  y", "x"),
        (2, "x\n\ty\n\t\tz\n", "x"),
        (0, "x\ny\n", "x\ny\n"),
        (4, "\n    y\nz", "\n    y"),
        (4, "x\n    ", "x\n    "),
    ],
)
def test_a_text_ends_before_a_line_that_is_indented_less(n_indent: int, text: str, kept: str) -> None:
    assert lines(FillIn(suffix="", n_indent=n_indent), text) == kept


def test_a_text_ends_with_its_line_when_time_is_over(clock: Clock) -> None:
    def later(kept: str) -> None:
        clock.now = 1.0 if "a = 1" in kept else 0.0

    asked = FillIn(suffix="", max_ms=500)
    assert lines(asked, "a = 12\nb = 2\n", later) == "a = 12"
    assert lines(asked, "\na = 12\nb = 2\n", later) == "\na = 12"

    def at_once(kept: str) -> None:
        clock.now += 1.0

    assert lines(asked, "\n\n  first\nsecond", at_once) == "\n\n  first"  # something is written
    assert lines(asked, "no end", at_once) == "no end"


def test_stop_strings_count_too() -> None:
    assert lines(FillIn(suffix="", n_indent=1), "x\n yENDz", lambda text: None, "END") == "x\n y"


@pytest.mark.parametrize(
    ("suffix", "kept"),
    [
        ("\nprint(total)\n", "area(2)"),
        (")\n\n\nprint(total)\nmore", "area(2)"),
        ("\n}\nprint(total)\n", "area(2)\nprint(total)\n}\n"),  # too short to tell
        ("print(total)", "area(2)\nprint(total)\n}\n"),  # the rest of its own line
    ],
)
def test_what_follows_is_not_written_again(suffix: str, kept: str) -> None:
    assert lines(FillIn(suffix=suffix), "area(2)\nprint(total)\n}\n") == kept
