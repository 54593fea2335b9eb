"""Further figures on the demo model that no limit hangs on: unforeseen wordings, small sums, long chats."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable
from pathlib import Path

from demo import arithmetic
from demo.corpus import Topic

BLIND = Path(__file__).resolve().parent / "blind.toml"
SUMS = 60
CHATS, TURNS = 12, 10

Ask = Callable[..., str]
"""Messages, user first and then in turn, to the answer to the last one."""


def blind(ask: Ask, topics: list[Topic]) -> tuple[int, int]:
    """(right, all) questions of blind.toml that get one of their topic's answers."""
    questions = tomllib.loads(BLIND.read_text(encoding="utf-8"))["question"]
    names = _names(topics)
    return sum(q["topic"] in names.get(ask(q["text"]), ()) for q in questions), len(questions)


def sums(ask: Ask) -> tuple[int, int]:
    """(right, all) random small sums."""
    rng = random.Random(7)
    drawn = [arithmetic.sample(rng) for _ in range(SUMS)]
    return sum(ask(question) == answer for question, answer, _reason in drawn), SUMS


def long_chats(ask: Ask, topics: list[Topic]) -> list[int]:
    """For each turn, how many of `CHATS` chats on changing topics, in the corpus' own words, get a fitting answer."""
    rng = random.Random(5)
    names = _names(topics)
    right = [0] * TURNS
    for _ in range(CHATS):
        said: list[str] = []
        for turn in range(TURNS):
            topic = rng.choice(topics)
            said.append(rng.choice(topic.questions))
            said.append(ask(*said))
            right[turn] += topic.name in names.get(said[-1], ())
    return right


def _names(topics: list[Topic]) -> dict[str, set[str]]:
    """Each answer with the names of the topics that it belongs to."""
    found: dict[str, set[str]] = {}
    for topic in topics:
        for text in topic.answers:
            found.setdefault(text, set()).add(topic.name)
    return found
