"""Published claims about language models on CPUs, each checked by hand: `claims.toml` beside this file."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import msgspec

from cpuchat import toml

Verdict = Literal["plausible", "only if", "impossible"]


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where claims come from, and of what kind they are there."""

    id: str
    title: str
    nature: str


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plan that a claim quotes `figures` of, in their order.

    Fields of `Plan`; "α 0.6": tok/s with a draft model at that acceptance rate; "verify 13": milliseconds of a pass
    over 13 tokens; "GB": memory without a draft model; "weights": of the file.
    """

    machine: str
    model: str
    figures: tuple[str, ...]

    @property
    def command(self) -> str:
        """Return what shows the plan."""
        return f"cpuchat plan {self.model} --on {self.machine}"


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A figure of a document, what the planner gives for it, the verdict, and its arithmetic in a line.

    `condition` completes "only if". `check` is where figures of `planner` come from.
    """

    document: str
    claim: str
    planner: str
    verdict: Verdict
    condition: str = ""
    arithmetic: str
    check: Check | None = None

    def __post_init__(self) -> None:
        if (self.verdict == "only if") != bool(self.condition):
            raise ValueError("condition: belongs to the verdict `only if`")

    @property
    def judged(self) -> str:
        """Return the verdict with its condition."""
        return f"{self.verdict} {self.condition}".strip()


class Claims(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    document: tuple[Document, ...]
    claim: tuple[Claim, ...]


@functools.cache
def claims() -> Claims:
    """Return all documents and their claims."""
    text = Path(__file__).with_name("claims.toml").read_text(encoding="utf-8")
    return msgspec.convert(toml.loads(text), Claims)
