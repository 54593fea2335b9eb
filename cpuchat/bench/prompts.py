"""The prompts that speed is measured on: code, summaries, maths and chat differ in how well they can be drafted."""

from __future__ import annotations

import importlib.resources
from typing import Literal

import msgspec

from cpuchat import toml

Kind = Literal["code", "summary", "maths", "chat"]


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One user message; `name` is unique."""

    kind: Kind
    name: str
    text: str


class _Prompts(msgspec.Struct, forbid_unknown_fields=True):
    prompt: list[Prompt]


def load() -> list[Prompt]:
    """Return the built-in prompts, each kind's together."""
    text = (importlib.resources.files("cpuchat.bench") / "prompts.toml").read_text(encoding="utf-8")
    prompts = msgspec.convert(toml.loads(text), _Prompts).prompt
    return [msgspec.structs.replace(prompt, text=prompt.text.strip()) for prompt in prompts]
