"""The built-in texts that quality is measured on: written for this project, so that no model was trained on them.

Editing one changes every figure measured on it: figures of different versions of a text are not comparable.
"""

from __future__ import annotations

import importlib.resources
from functools import cache

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.protocol.messages import Message
from cpuchat.quality.messages import Text


class _Dialogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: tuple[Message, ...]


def prose() -> str:
    """Return English prose: an essay, stories, explanations, news, letters. One paragraph a line."""
    return _text("prose.txt")


def code() -> str:
    """Return commented source files in Python, C, Rust, SQL, shell and TypeScript, and configuration files."""
    return _text("code.txt")


def dialogues() -> list[list[Message]]:
    """Return conversations of 2 to 8 turns, beginning with the user's and ending with an answer in Markdown."""
    lines = _text("dialogue.jsonl").splitlines()
    return [list(msgspec.json.decode(line, type=prepared(_Dialogue)).messages) for line in lines]


def builtin_texts() -> tuple[Text, ...]:
    """Return all of it, as a measurement takes it."""
    return (
        Text(kind="prose", content=prose()),
        Text(kind="code", content=code()),
        Text(kind="dialogue", dialogues=tuple(map(tuple, dialogues()))),
    )


@cache
def _text(name: str) -> str:
    return (importlib.resources.files("cpuchat.quality.texts") / name).read_text(encoding="utf-8")
