"""The prompts of the benchmark cover the four kinds, and give a drafter what that kind gives in real chats."""

from __future__ import annotations

import ast
import re
from typing import get_args

from cpuchat.base.text import is_safe
from cpuchat.bench.matrix import Kind, load

PROMPTS = load()


def test_every_kind_has_several() -> None:
    kinds = [prompt.kind for prompt in PROMPTS]
    assert all(kinds.count(kind) >= 3 for kind in get_args(Kind))
    assert kinds == sorted(kinds, key=get_args(Kind).index)
    assert len({prompt.name for prompt in PROMPTS}) == len(PROMPTS)
    assert is_safe(prompt.text for prompt in PROMPTS)
    assert all(prompt.text == prompt.text.strip() for prompt in PROMPTS)


def test_there_is_something_to_summarize() -> None:
    for prompt in PROMPTS:
        if prompt.kind == "summary":
            assert len(prompt.text.split()) >= 330  # a passage of at least 300, and the task


def test_there_is_code_to_edit_and_code_to_write() -> None:
    blocks = [
        re.findall(r"```(\w+)\n(.*?)\n```", prompt.text, re.DOTALL) for prompt in PROMPTS if prompt.kind == "code"
    ]
    assert [] in blocks
    given = [block for found in blocks for block in found]
    assert len(given) >= 2
    for language, source in given:
        if language == "python":
            ast.parse(source)
