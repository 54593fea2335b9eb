"""The built-in questions are right, answers are judged as a person would, and the user's files are checked."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections.abc import AsyncGenerator
from fractions import Fraction
from pathlib import Path

import pytest

from cpuchat.base.errors import MeasureFailed, UsageError
from cpuchat.base.text import is_safe
from cpuchat.protocol.messages import AnyEvent, Generate, GenerationFinished, TextDelta
from cpuchat.protocol.timings import Timings
from cpuchat.quality.measure import Answered, ask_all
from cpuchat.quality.questions import MAX_BYTES, Check, Question, is_right, load, mcnemar

QUESTIONS = load()


def question(answer: str, check: Check) -> Question:
    return Question(id="q", prompt="?", answer=answer, check=check)


# The built-in ones.


def test_there_are_enough_of_each_kind() -> None:
    kinds = [one.kind for one in QUESTIONS]
    assert len(QUESTIONS) >= 60
    assert {kind: kinds.count(kind) >= 8 for kind in kinds} == dict.fromkeys(
        ("arithmetic", "word problem", "units", "fact", "code", "text", "logic"), True
    )
    assert len({one.prompt for one in QUESTIONS}) == len(QUESTIONS)
    assert is_safe(text for one in QUESTIONS for text in (one.prompt, one.answer))


PHRASINGS = (
    "{}", " {}\n", "{}.", "**{}**", "`{}`", '"{}"', "```\n{}\n```", "The answer is {}.", "The answer is **{}**.",
    "Answer: {}", "**Answer:** {}", "Final answer: `{}`", "$\\boxed{{{}}}$", "\\({}\\)",
)  # fmt: skip


def test_their_own_answers_are_right_however_they_are_put() -> None:
    for one in QUESTIONS:
        for phrasing in PHRASINGS:
            assert is_right(one, phrasing.format(one.answer)), (one.id, phrasing)


def test_near_misses_are_wrong() -> None:
    for one in QUESTIONS:
        if one.check == "number":
            misses = [f"1{one.answer}", f"{one.answer}1", f"{one.answer}5.5", str(-float(one.answer)), "I don't know."]
        else:
            misses = [one.answer[:-1], f"x{one.answer}", f"{one.answer}x", one.answer[::-1] + "y", ""]
        for miss in misses:
            assert not is_right(one, miss), (one.id, miss)
            assert not is_right(one, f"The answer is **{miss}**."), (one.id, miss)


def test_programs_print_what_is_expected() -> None:
    for one in QUESTIONS:
        if one.kind == "code":
            program = re.search(r"```python\n(.*?)\n```", one.prompt, re.DOTALL)
            assert program is not None
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(program[1], {})
            assert printed.getvalue() == f"{one.answer}\n", one.id


def test_arithmetic_is_computed() -> None:
    for one in QUESTIONS:
        if one.kind == "arithmetic":
            term = re.match(r"What is (.*)\? Answer", one.prompt)
            assert term is not None
            exact = re.sub(r"\d+(?:\.\d+)?", r"Fraction('\g<0>')", term[1].replace("×", "*").replace("^", "**"))
            assert eval(exact, {"Fraction": Fraction}) == Fraction(one.answer), one.id


# Judging.


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        ("42", "42 apples"),
        ("42", "It is 42€"),
        ("42", "$42"),
        ("42", "42 km/h"),
        ("42", "6 × 7 = 42"),
        ("42", "6 + 36 = **42**."),
        ("42", "42.0"),
        ("42", "042"),
        ("42", "The total is 42%."),
        ("42", "Answer...42"),
        ("12", "12 m²"),
        ("12", "12 m^2"),
        ("12", "12 cm^{2}"),
        ("12", "$12\\ \\text{cm}^2$"),
        ("12", "12 mg of CO2"),
        ("1234567", "1,234,567"),
        ("1234567", "1\u2009234\u2009567"),
        ("1234567", "1{,}234{,}567"),
        ("1234567", "1'234'567"),
        ("10000", "10\u202f000 cm²"),
        ("10000", "10\\,000"),
        ("1234.5", "1,234.50."),
        ("-25", "-25"),
        ("-25", "−25"),
        ("-25", "= -25"),
        ("-25", "x=-25"),
        ("-25", "-$25"),
        ("-25", "$-25$"),
        ("-25", "(-25)"),
        ("7", "22-15: 7"),
        ("7", "10-7"),
        ("0.07", "0.070"),
    ],
)  # fmt: skip
def test_numbers_are_found(wanted: str, answer: str) -> None:
    assert is_right(question(wanted, "number"), answer)


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        ("42", ""),
        ("42", "forty-two"),
        ("42", "42 or 43"),
        ("42", "-42"),
        ("42", "4.2"),
        ("42", "4,242"),
        ("42", "42.01"),
        ("42", "A42"),
        ("42", "1.42"),
        ("7", "x = -7"),
        ("1234", "1,2345"),
        ("-25", "25"),
        ("0.07", "0.7"),
    ],
)  # fmt: skip
def test_other_numbers_are_wrong(wanted: str, answer: str) -> None:
    assert not is_right(question(wanted, "number"), answer)


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        ("[1, 9, 25]", "The program prints: [1, 9, 25]"),
        ("[1, 9, 25]", "The output is:\n\n```python\n[1, 9, 25]\n```"),
        ("[1, 9, 25]", "It will print `[1, 9, 25]`."),
        ("pmal", "The word spelled backwards is **pmal**."),
        ("pmal", 'The word "lamp" spelled backwards is "pmal."'),
        ("pmal", "“pmal”"),
        ("apple", "Apple"),
        ("apple", "**Apple.**"),
        ("3 2", "3  2\n"),
        ("RAM", "So, the answer is: RAM"),
        ("yes...", "yes..."),
        ("answer", "answer"),
        ("__init__", "`__init__`"),
    ],
)
def test_exact_answers_may_be_introduced(wanted: str, answer: str) -> None:
    assert is_right(question(wanted, "exact"), answer)


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        ("[1, 9, 25]", "[1,9,25]"),
        ("[1, 9, 25]", "[1, 9, 25, 49]"),
        ("RAM", "ram"),
        ("apple", "APPLE"),
        ("Paul", "paul"),
        ("Paul", "Sven finished before Paul."),
        ("RAM", "RAM or ROM"),
        ("pmal", "pmal is the word"),
        ("3 2", "3, 2"),
    ],
)
def test_exact_answers_are_compared_whole(wanted: str, answer: str) -> None:
    assert not is_right(question(wanted, "exact"), answer)


@pytest.mark.parametrize(
    ("wanted", "answer", "right"),
    [
        ("Clara Voss", "The engineer was **Clara\nVoss**.", True),
        ("Clara Voss", "CLARA VOSS", True),
        ("Clara Voss", "Clara M. Voss", False),
        ("Pell", "They ended at Pell, because …", True),
        ("Pell", "The spelling is unclear", False),
        ("Dmitri", "Dmitri's", True),
        ("end", "At the end.", True),
        ("end", "In the weekend", False),
        ("don't", "I don’t", True),
        ("3.5", "It takes 3.5 hours", True),
        ("3.5", "It takes 13.5 hours", False),
        ("C++", "I would use C++.", True),
    ],
)
def test_contained_answers_are_whole_words(wanted: str, answer: str, right: bool) -> None:
    assert is_right(question(wanted, "contains"), answer) is right


def test_a_long_answer_is_judged_at_once() -> None:
    for filler in ("1,", "a ", "**", "the ", "\\text{", "-", "`", "1,234,"):
        for check in ("number", "exact", "contains"):
            is_right(question("7", check), filler * 50_000)


# The user's own.


def user_file(folder: Path, *lines: str | dict[str, str]) -> Path:
    file = folder / "mine.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return file


SUM = {"id": "a", "prompt": "What is 2 + 3?", "answer": "5", "check": "number"}


def test_a_users_file(tmp_path: Path) -> None:
    found = load(
        user_file(tmp_path, "\ufeff" + json.dumps(SUM), "", SUM | {"id": "b", "kind": "mine", "answer": "-2.5"})
    )
    assert [(one.id, one.kind, one.answer) for one in found] == [("a", "user", "5"), ("b", "mine", "-2.5")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected `object`"),
        (json.dumps({"id": "b", "prompt": "?", "answer": "1"}), "`check`"),
        (json.dumps(SUM | {"check": "close"}), "check: invalid enum value 'close'"),
        (json.dumps(SUM | {"id": "b", "answer": 5}), "answer: expected `str`"),
        (json.dumps(SUM | {"id": "b", "answer": "five"}), "answer: 'five' is not a plain number"),
        (json.dumps(SUM | {"id": "b", "answer": "**", "check": "exact"}), "answer: is empty"),
        (json.dumps(SUM | {"id": "b", "prompt": " "}), "prompt: is empty"),
        (json.dumps(SUM | {"id": ""}), "id: expected `str` of length >= 1"),
        (json.dumps(SUM | {"id": "b", "anwser": "5"}), "unknown field `anwser`"),
        (json.dumps(SUM), "id: 'a' is also in line 1"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        load(user_file(tmp_path, SUM, "", line))
    assert "mine.jsonl, line 3" in raised.value.message
    assert says in raised.value.message
    assert raised.value.hint


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    large = tmp_path / "large"
    large.write_bytes(b" " * (MAX_BYTES + 1))
    for file, says in (
        (tmp_path / "none", "cannot be read: No such file"), (tmp_path, "cannot be read"), (binary, "not UTF-8"),
        (large, "larger than 4 MiB"), (user_file(tmp_path, "", " "), "no questions"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=re.escape(says)) as raised:
            load(file)
        assert file.name in raised.value.message


# Asking.


async def test_questions_that_were_stopped_are_resumed() -> None:
    questions = [Question(id=str(n), prompt=f"{n}", answer=f"{n}", check="number") for n in range(3)]
    asked: list[str] = []
    stopped_at = "1"

    async def answer(request: Generate) -> AsyncGenerator[AnyEvent, None]:
        prompt = request.messages[0].content
        asked.append(prompt)
        yield TextDelta(request_id=1, text=prompt)
        yield GenerationFinished(
            request_id=1, stop_reason="cancelled" if prompt == stopped_at else "end", timings=Timings()
        )

    done: list[Answered] = []
    with pytest.raises(MeasureFailed, match=r"^Stopped at 1 of 3\. Run again to resume\.$"):
        await ask_all(answer, questions, done=done)
    with pytest.raises(MeasureFailed, match="Stopped at 1 of 3"):  # between two questions
        await ask_all(answer, questions, done=done, is_stopped=lambda: True)
    stopped_at = ""
    assert await ask_all(answer, questions, done=done) is done
    assert [one.right for one in done] == [True] * 3 and asked == ["0", "1", "1", "2"]


# McNemar's test.


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (3, 2, 1.0),
        (0, 1, 1.0),
        (0, 5, 2 / 32),
        (1, 5, 14 / 64),
        (0, 6, 2 / 64),
        (2, 10, 158 / 4096),
        (10, 2, 158 / 4096),
    ],
)  # fmt: skip
def test_mcnemar_by_hand(b: int, c: int, p: float) -> None:
    assert mcnemar(b, c) == p


def test_mcnemar_of_many() -> None:
    normal = math.erfc((300 - 1) / math.sqrt(2 * 8_300))  # corrected for continuity
    assert mcnemar(4_000, 4_300) == pytest.approx(normal, rel=0.01)
    assert mcnemar(0, 3_000) == 0.0  # below the smallest float
    with pytest.raises(ValueError, match="negative"):
        mcnemar(-1, 2)
