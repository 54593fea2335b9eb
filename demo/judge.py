"""The written rule by which an answer counts as right and as fluent. Plain Python, no model in it.

Right: every list of the key's `must` has at least one of its substrings in the lower-cased answer, and no substring of
`must_not` is in it. Fluent: the answer has at least three words, ends like a sentence, repeats no word and no phrase of
two to eight words directly (unless a corpus answer does the same), uses only words that the corpus' answers use
(numbers are free), and at least 80 % of its runs of four words occur in those answers. An answer passes only when it
is right and fluent.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RUN = 4
MIN_OVERLAP = 0.8
MIN_WORDS = 3


@dataclass(frozen=True)
class Key:
    """What an answer to one held-back question must and must not hold."""

    text: str
    topic: str
    must: tuple[tuple[str, ...], ...]
    must_not: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """`missing` and `forbidden` name what broke the key, `faults` what broke fluency; all empty means passed."""

    missing: tuple[tuple[str, ...], ...] = ()
    forbidden: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        return not self.missing and not self.forbidden

    @property
    def fluent(self) -> bool:
        return not self.faults

    @property
    def passed(self) -> bool:
        return self.right and self.fluent


def load_keys(folder: Path = FOLDER) -> list[Key]:
    """The held-back questions of every `heldback_*.toml` in `folder`."""
    keys = []
    for path in sorted(folder.glob("heldback_*.toml")):
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["question"]:
            must = tuple(tuple(option.lower() for option in options) for options in entry["must"])
            must_not = tuple(text.lower() for text in entry.get("must_not", []))
            keys.append(Key(entry["text"], entry["topic"], must, must_not))
    return keys


def words(text: str) -> list[str]:
    """Lower-cased words and numbers of `text`, punctuation and markup left out."""
    return re.findall(r"[a-z0-9]+(?:['.+_/-][a-z0-9]+)*", text.lower())


class Reference:
    """What fluent text of this corpus is made of: its words and its runs of four words."""

    def __init__(self, answers: Iterable[str]) -> None:
        self.words: set[str] = set()
        self.runs: set[tuple[str, ...]] = set()
        self.doubled: set[str] = set()
        for answer in answers:
            known = words(answer)
            self.words.update(known)
            self.runs.update(_runs(known))
            self.doubled.update(_repeated(known))

    def faults(self, answer: str) -> tuple[str, ...]:
        """Why `answer` is not fluent; empty if it is."""
        found = []
        said = words(answer)
        if len(said) < MIN_WORDS:
            found.append(f"only {len(said)} words")
        if not re.search(r"[.!?][\"'*`)]*$", answer.strip()):
            found.append("does not end like a sentence")
        if repeats := _repeated(said) - self.doubled:
            found.append(f"repeats {sorted(repeats)}")
        if unknown := [w for w in said if w not in self.words and not w.isdigit()]:
            found.append(f"unknown words {unknown}")
        runs = _runs(said)
        if runs:
            overlap = sum(run in self.runs for run in runs) / len(runs)
            if overlap < MIN_OVERLAP:
                found.append(f"only {overlap:.0%} of its word runs are known")
        return tuple(found)


def judge(answer: str, key: Key, reference: Reference | None = None) -> Verdict:
    """The verdict on `answer`; fluency is left out when there is no `reference`."""
    lowered = answer.lower()
    return Verdict(
        missing=tuple(options for options in key.must if not any(option in lowered for option in options)),
        forbidden=tuple(text for text in key.must_not if text in lowered),
        faults=reference.faults(answer) if reference else (),
    )


def _runs(said: list[str]) -> list[tuple[str, ...]]:
    return [tuple(said[i : i + RUN]) for i in range(len(said) - RUN + 1)]


def _repeated(said: list[str]) -> set[str]:
    """The phrases of one to eight words that follow themselves directly; single numbers are left out."""
    return {
        " ".join(said[i : i + size])
        for size in range(1, 9)
        for i in range(len(said) - 2 * size + 1)
        if said[i : i + size] == said[i + size : i + 2 * size] and not (size == 1 and said[i].isdigit())
    }
