"""The built-in texts are long enough to measure on, and well-formed."""

from __future__ import annotations

import ast
import re

from cpuchat.base.text import is_safe
from cpuchat.quality import texts

CHARACTERS_PER_TOKEN = 4


def test_together_they_give_sixteen_thousand_tokens() -> None:
    dialogue = [message.content for messages in texts.dialogues() for message in messages]
    assert len(texts.prose()) >= 24_000
    assert len(texts.code()) >= 16_000
    assert sum(map(len, dialogue)) >= 24_000
    assert len(texts.prose() + texts.code() + "".join(dialogue)) >= 16_000 * CHARACTERS_PER_TOKEN
    assert is_safe([texts.prose(), texts.code(), *dialogue])


def test_users_and_assistants_take_turns() -> None:
    dialogues = texts.dialogues()
    assert len(dialogues) >= 20
    for messages in dialogues:
        assert 2 <= len(messages) <= 8
        assert [message.role for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(message.content == message.content.strip() != "" for message in messages)


def test_python_in_answers_compiles() -> None:
    answers = [message.content for messages in texts.dialogues() for message in messages]
    blocks = [block for answer in answers for block in re.findall(r"```python\n(.*?)```", answer, re.DOTALL)]
    assert len(blocks) >= 10
    for block in blocks:
        ast.parse(block)
