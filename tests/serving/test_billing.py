"""Tests that the line which Claude Code bills by, another one in each request, reaches no prompt."""

from __future__ import annotations

from typing import Any

import pytest

from cpuchat.protocol.messages import Message
from tests.serving.test_dialects import read

LINE = "x-anthropic-billing-header: cc_version=2.1.37.1d9; cc_entrypoint=cli; cch=fa691;"
SHORT = "x-anthropic-billing-header: cc_version=2.1.88.a31; cc_entrypoint=sdk-cli;"
LONG = LINE.replace("cch", "cc_workload=cron; cch")
RULES = "You are careful, and you read each file twice."


def blocks(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def messages(system: Any) -> tuple[Message, ...]:
    return read("/v1/messages", {"system": system, "messages": [{"role": "user", "content": "Hello"}]}).request.messages


def chat(*systems: Any) -> tuple[Message, ...]:
    talk = [*({"role": "system", "content": one} for one in systems), {"role": "user", "content": "Hello"}]
    return read("/v1/chat/completions", {"messages": talk}).request.messages


def responses(system: str) -> tuple[Message, ...]:
    return read("/v1/responses", {"instructions": system, "input": "Hello"}).request.messages


@pytest.mark.parametrize(
    "read_as",
    [
        pytest.param(lambda: messages(blocks(LINE, RULES)), id="blocks-hash"),
        pytest.param(lambda: messages(blocks(SHORT, RULES)), id="blocks-no hash"),
        pytest.param(lambda: messages(blocks(LONG, RULES)), id="blocks-workload"),
        pytest.param(lambda: messages(f"{LINE.rstrip(';')}\n{RULES}"), id="a text"),
        pytest.param(lambda: messages(f"\n{SHORT}\n\n{RULES}"), id="an empty line"),
        pytest.param(lambda: chat(f"{LINE}\n{RULES}"), id="chat-hash"),
        pytest.param(lambda: chat(blocks(SHORT, RULES)), id="parts"),
        pytest.param(lambda: chat(LONG, RULES), id="a message of its own"),
        pytest.param(lambda: responses(f"{LINE}\n{RULES}"), id="instructions"),
    ],
)
def test_the_line_that_claude_code_bills_by_ends_no_reuse(read_as: Any) -> None:
    assert read_as() == chat(RULES)


def test_text_right_after_the_line_stays() -> None:
    """As where a proxy joins blocks without anything between them; and what only speaks of it."""
    assert chat(LINE + RULES) == chat(RULES)
    for text in (f"What does this mean?\n{LINE}", "x-anthropic-billing-header: is what I ask about."):
        assert chat(text)[0].content == text
    assert [one.role for one in chat(LINE)] == ["user"], "nothing else is in that message"
