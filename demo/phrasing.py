"""Questions put together from parts (phrasings.toml): what someone wants, what is wrong, what he has read of."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

FILE = Path(__file__).resolve().parent / "phrasings.toml"

# fmt: off
WANT = (
    "how do I {}", "how can I {}", "how to {}", "how would I {}", "what do I press to {}", "which key lets me {}",
    "is there a way to {}", "can I {}", "I want to {}", "I would like to {}", "I need to {}", "help me {}", "{}",
    "is it possible to {}", "what is the way to {}", "can you tell me how to {}", "any way to {}", "how does one {}",
    "I'd like to {}, how", "I want to {}, what do I do", "could I {}", "where do I {}", "show me how to {}",
    "what should I do to {}", "what is the trick to {}", "is there something to {}", "what must I type to {}",
    "please {}", "can it {}", "how am I supposed to {}", "what is needed to {}", "I cannot find out how to {}",
    "let me {}", "what helps me to {}", "tell me how I {}", "does it let me {}",
)
PROBLEM = (
    "{}", "{}, what can I do", "{}, how do I fix that", "{}, any advice", "{}, help", "what if {}", "{}, what now",
    "what do I do when {}", "{}, is there a way out", "{} and I don't know what to do", "{}, what should I do",
    "{}, which key helps", "{}, can I change that", "what can I do if {}", "{}, what is best", "{}, does it matter",
    "{}, can you help", "and if {}", "{}, is that a problem", "{}, will it work",
)
BOTH = (
    "{p}, how do I {w}", "{p}, how can I {w}", "{p}. I want to {w}", "{p} and I want to {w}", "{p}, I'd like to {w}",
    "what do I press when {p} and I want to {w}", "I want to {w} because {p}", "how do I {w} when {p}",
    "{p}, which key lets me {w}", "{p}, can I {w}", "{p}, is there a way to {w}", "if {p}, how do I {w}",
    "{p} so I need to {w}", "{p}, please {w}", "{p} - {w}", "can I {w}, {p}", "{p}, what do I press to {w}",
    "{p}, I would like to {w}, where",
)
NAME = (
    "what is {}", "what's {}", "tell me about {}", "explain {}", "{}", "what does {} mean", "describe {}",
    "can you explain {}", "what do you know about {}", "I read about {}, what is it", "could you tell me what is {}",
    "how does {} work", "{} in simple words", "define {}", "what exactly is {}", "what is meant by {}", "{} meaning",
    "so what does {} tell me", "I don't understand {}", "give me a short explanation of {}", "what about {}",
    "I would like to know what is {}", "please explain {}", "help me understand {}", "what can you say about {}",
    "where do I find {}", "what is {} good for", "is {}", "what are {}",
)
FACT = (
    "why is it that {}", "how come {}", "what is the reason that {}", "{}, why", "explain why {}",
    "can you tell me why {}", "I read that {}, is it true", "why would it be that {}", "is it true that {}",
    "how can it be that {}", "{}, how come", "I see that {}, why is that", "I don't get why {}", "what makes it {}",
    "explain how {}", "how is it that {}", "could you explain how {}",
    "could you explain why {}", "is it normal that {}", "they say {}, why", "{}", "does it mean that {}",
)
# fmt: on
_CHOICE = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Parts:
    """What questions about one topic are made of; each part may hold choices such as {a|b}."""

    wants: tuple[str, ...]
    problems: tuple[str, ...]
    names: tuple[str, ...]
    facts: tuple[str, ...]
    asks: tuple[str, ...]

    def compose(self, rng: random.Random) -> str:
        """One random question."""
        kinds = {"want": len(self.wants) * 3, "problem": len(self.problems), "name": len(self.names) * 2,
                 "fact": len(self.facts) * 3, "both": 4 * bool(self.wants and self.problems),
                 "ask": 4 * len(self.asks)}  # fmt: skip
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        if kind == "want":
            return rng.choice(WANT).format(pick(self.wants, rng))
        if kind == "problem":
            return rng.choice(PROBLEM).format(pick(self.problems, rng))
        if kind == "name":
            return rng.choice(NAME).format(pick(self.names, rng))
        if kind == "fact":
            return rng.choice(FACT).format(pick(self.facts, rng))
        if kind == "ask":
            return pick(self.asks, rng)
        return rng.choice(BOTH).format(w=pick(self.wants, rng), p=pick(self.problems, rng))

    def all(self) -> tuple[str, ...]:
        return (*self.wants, *self.problems, *self.names, *self.facts, *self.asks)


def load_parts(path: Path = FILE) -> dict[str, Parts]:
    """Parts by topic key."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["phrasing"]
    kinds = ("wants", "problems", "names", "facts", "asks")
    return {entry["topic"]: Parts(*(tuple(entry.get(kind, ())) for kind in kinds)) for entry in entries}


def pick(parts: tuple[str, ...], rng: random.Random) -> str:
    """One of `parts` with its choices made."""
    text = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), rng.choice(parts))
    return re.sub(r"\s+", " ", text).strip()


def variants(part: str) -> Iterator[str]:
    """Every text that `part` stands for."""
    pieces = [piece.split("|") if i % 2 else [piece] for i, piece in enumerate(_CHOICE.split(part))]
    for chosen in product(*pieces):
        yield re.sub(r"\s+", " ", "".join(chosen)).strip()
