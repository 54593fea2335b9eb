"""Short questions with checkable answers: how many answers change with a smaller file.

Built in: `questions.jsonl`. A user's file has the same form, one JSON object per line:
`{"id": "sum-1", "prompt": "What is 2 + 3?", "answer": "5", "check": "number"}`.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cpuchat.base import paths
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import UsageError
from cpuchat.config.settings import explained

Check = Literal["number", "exact", "contains"]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=20_000)]

MAX_BYTES = 4 << 20
"""A longer file of questions is not read."""
_NAME = "questions.jsonl"
_FORM = 'Each line is an object such as {"id": "sum-1", "prompt": "What is 2 + 3?", "answer": "5", "check": "number"}.'


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question. `check` says when an answer is right:

    - `number`: the last number in it equals `answer`;
    - `exact`: all of it is `answer`, but for Markdown, quotes, spacing, a full stop and "The answer is"; case counts,
      except that the first letter may be a capital;
    - `contains`: it contains `answer` as whole words; case doesn't count. Not for answers that the prompt offers as a
      choice: repeating the choice would count as right.
    """

    id: Text
    kind: Text = "user"
    prompt: Text
    answer: Text
    check: Check

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError("prompt: is empty")
        if self.check == "number" and not re.fullmatch(r"-?\d+(\.\d+)?", self.answer, re.ASCII):
            raise ValueError(f"answer: {self.answer!r} is not a plain number such as 42 or -3.5, which `number` needs")
        if self.check != "number" and not _normalized(self.answer):
            raise ValueError("answer: is empty")


def load(path: Path | None = None) -> list[Question]:
    """Return the questions of a JSONL file, or the built-in ones. Blank lines are skipped. Raises UsageError: the file
    cannot be read, has no questions, or a line is invalid; the message names file and line.
    """
    if path is None:
        text = (importlib.resources.files("cpuchat.quality") / _NAME).read_text(encoding="utf-8")
        return list(_questions(text, _NAME))
    shown = paths.shown(path)
    try:
        text = paths.read_text(path, MAX_BYTES)
    except OSError as error:
        raise UsageError(f"{shown}: cannot be read: {error.strerror}.", "Choose another file.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{shown}: not UTF-8.", "Save it as UTF-8.") from None
    questions = list(_questions(text, shown))
    if not questions:
        raise UsageError(f"{shown}: no questions.", _FORM)
    return questions


def _questions(text: str, file: str) -> Iterator[Question]:
    lines: dict[str, int] = {}
    # Not `splitlines`: JSON strings may contain U+2028 and the like.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            question = msgspec.json.decode(line, type=prepared(Question))
        except msgspec.ValidationError as error:
            key, reason = explained(error)
            raise UsageError(f"{file}, line {number}{f', {key}' if key else ''}: {reason}.", _FORM) from None
        except msgspec.DecodeError as error:
            raise UsageError(f"{file}, line {number}: not valid JSON: {error}.", _FORM) from None
        if question.id in lines:
            raise UsageError(
                f"{file}, line {number}, id: {question.id!r} is also in line {lines[question.id]}.",
                "Give each question a unique id.",
            )
        lines[question.id] = number
        yield question


# Not within a word (H2O). A hyphen is a sign unless a word, a number or a bracket ends before it.
_NUMBER = re.compile(
    r"(?<!\w)(?<!\d\.)(?:(?<![\w)])(?P<sign>[-−]))?[$€£]?"
    r"(?P<digits>\d{1,3}(?:[,'_\u00a0\u2009\u202f]\d{3})+(?!\d)|\d+)(?P<decimals>\.\d+)?",
    re.ASCII,
)
_EXPONENT = re.compile(r"\^(?:\{[^{}]*\}|-?\w+)")
_FENCE = re.compile(r"^\s*(?:```|~~~)[\w+-]*\s*$", re.MULTILINE)
_BRACES = re.compile(r"\\(?:boxed|text|mathrm|mathbf)\{([^{}]*)\}")
# "The answer is", "Final answer:", "It prints", "The reversed word is:", "Output:".
_INTRODUCTION = re.compile(
    r"(?:(?:so|therefore|thus),? )?(?:"
    r"(?:the|this|my|your) (?:[\w\"'`“”*-]+ ){1,5}is(?: ?:)?"
    r"|(?:final |correct )?(?:answer|output|result)(?: ?[:=]| is:?)"
    r"|(?:it|this|the (?:\w+ )?\w+) (?:will )?(?:prints?|outputs?)(?: ?:)?"
    r") ?",
    re.IGNORECASE,
)
_AROUND = "*_`$\"'“”‘’ \n\t"


def is_right(question: Question, answer: str) -> bool:
    """Judge a model's answer by the question's check."""
    if question.check == "number":
        numbers = _numbers(answer)
        return bool(numbers) and numbers[-1] == Decimal(question.answer)
    if question.check == "exact":
        given, wanted = _normalized(answer), _normalized(question.answer)
        return given in (wanted, wanted[:1].upper() + wanted[1:])
    wanted = re.escape(_loose(question.answer))
    return re.search(rf"(?<!\w){wanted}(?!\w)", _loose(answer)) is not None


def _numbers(answer: str) -> list[Decimal]:
    """Return the numbers in a text, without separators of thousands, currencies, units and exponents."""
    plain = _EXPONENT.sub("", _without_maths(answer)).replace("*", "").replace("`", "")
    return [
        Decimal(f"{'-' if match['sign'] else ''}{re.sub(r'[^0-9]', '', match['digits'])}{match['decimals'] or ''}")
        for match in _NUMBER.finditer(plain)
    ]


def _normalized(answer: str) -> str:
    """Return an answer without the Markdown, quotes, introduction and full stop around it; one space between words."""
    text, before = " ".join(_FENCE.sub("", _without_maths(answer)).split()), None
    while text != before:
        before = text
        text = text.strip(_AROUND)
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1]
        introduction = _INTRODUCTION.match(text)
        if introduction is not None and introduction.end() < len(text):
            text = text[introduction.end() :]
    return text


def _loose(answer: str) -> str:
    """Return an answer's words in lower case, without Markdown marks and with plain apostrophes and spaces."""
    text = _without_maths(answer).translate(str.maketrans("’‘", "''", "*`"))
    return " ".join(text.casefold().split())


def _without_maths(answer: str) -> str:
    r"""Remove the marks of LaTeX that models put around an answer: `\boxed{4{,}096}`, `\(4\)`, `4\,096`."""
    text = answer.replace("{,}", ",").replace("\\,", "\u2009").replace("\\%", "%").replace("\\$", "$")
    text = re.sub(r"\\[()\[\]]", "", text)
    return _BRACES.sub(r"\1", text)


def mcnemar(b: int, c: int) -> float:
    """Return the exact two-sided p-value of McNemar's test for paired answers.

    `b` questions only the first model answers right, `c` only the second; those on which both agree tell nothing. With
    equal models each of the `b + c` falls to either side with probability ½, so p = 2 Σ_{i ≤ min(b, c)} C(n, i) / 2ⁿ,
    at most 1; 1 when n is 0. McNemar, Psychometrika 12 (1947) 153, in its binomial form.
    """
    if b < 0 or c < 0:
        raise ValueError("counts of questions must not be negative")
    n = b + c
    tail = term = 1
    for i in range(min(b, c)):
        term = term * (n - i) // (i + 1)
        tail += term
    return min(1.0, 2 * tail / (1 << n))
