"""Answer flips: which questions one model answers right and the other wrong, greedily.

Equal accuracy hides flipped answers (arXiv 2407.09141), so answers are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from cpuchat.greedy import Answering, answer_greedily
from cpuchat.protocol import Generate, Message, TextDelta
from cpuchat.quality.questions import Question, is_right, mcnemar
from cpuchat.telemetry.units import plural

MAX_TOKENS = 128
"""Per answer; the questions ask for short ones, and a rambling model must be stopped."""


class Answered(msgspec.Struct, frozen=True):
    """One answer without its reasoning, and whether it is right."""

    text: str
    right: bool


class Flips(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers of two models differ, counted over the same questions.

    `p` is McNemar's: how likely at least this difference is between models that are equally good.
    """

    both_right: int
    only_base: int
    only_other: int
    both_wrong: int

    @property
    def n(self) -> int:
        return self.both_right + self.only_base + self.only_other + self.both_wrong

    @property
    def p(self) -> float:
        return mcnemar(self.only_base, self.only_other)


def count_flips(base: Sequence[Answered], other: Sequence[Answered]) -> Flips:
    """Compare answers to the same questions, in the same order."""
    pairs = [(a.right, b.right) for a, b in zip(base, other, strict=True)]
    return Flips(
        both_right=pairs.count((True, True)),
        only_base=pairs.count((True, False)),
        only_other=pairs.count((False, True)),
        both_wrong=pairs.count((False, False)),
    )


async def ask_all(
    answer: Answering, questions: Sequence[Question], tell: Callable[[int], None] = lambda _: None
) -> list[Answered]:
    """Ask every question by itself, greedily and without drafters.

    Args:
        tell: called with the number of questions answered so far.

    Raises:
        MeasureFailed: the engine failed, or it was stopped.
    """
    found: list[Answered] = []
    for question in questions:
        text = await _ask(answer, question.prompt, f"Stopped at {len(found)} of {plural(len(questions), 'question')}.")
        found.append(Answered(text, is_right(question, text)))
        tell(len(found))
    return found


async def _ask(answer: Answering, prompt: str, stopped: str) -> str:
    parts: list[str] = []

    def add(delta: TextDelta) -> None:
        if delta.channel == "answer":
            parts.append(delta.text)

    request = Generate(messages=(Message(role="user", content=prompt),), max_tokens=MAX_TOKENS)
    await answer_greedily(answer, request, add, if_stopped=(stopped, "Run it again: the questions start over."))
    return "".join(parts)
