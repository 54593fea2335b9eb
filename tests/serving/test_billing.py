"""Tests that the line which Claude Code bills by, another one in each request, reaches no prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.serving import Server

LINE = "x-anthropic-billing-header: cc_version=2.1.37.{0}d9; cc_entrypoint=cli; cch=fa69{0};"
SHORT = "x-anthropic-billing-header: cc_version=2.1.88.a3{0}; cc_entrypoint=sdk-cli;"
RULES = "You are careful, and you read each file twice. " * 8


def blocks(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def messages(system: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"system": system, "messages": [{"role": "user", "content": "Hello"}]}


def chat(*systems: Any) -> tuple[str, dict[str, Any]]:
    talk = [*({"role": "system", "content": one} for one in systems), {"role": "user", "content": "Hello"}]
    return "/v1/chat/completions", {"messages": talk}


def responses(system: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"instructions": system, "input": "Hello"}


def n_prompt(server: Server, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of a prompt, and how many of them were reused."""
    limit = {"max_output_tokens" if "input" in body else "max_tokens": 1}
    answer = server.post({**body, **limit}, path)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return usage.get("prompt_tokens", usage.get("input_tokens")), details["cached_tokens"]


@pytest.mark.parametrize(
    "line", [LINE, SHORT, LINE.replace("cch", "cc_workload=cron; cch")], ids=["hash", "no hash", "workload"]
)
@pytest.mark.parametrize(
    "ask",
    [
        lambda line: messages(blocks(line, RULES)),
        lambda line: messages(f"{line.rstrip(';')}\n{RULES}"),
        lambda line: messages(f"\n{line}\n\n{RULES}"),
        lambda line: chat(f"{line}\n{RULES}"),
        lambda line: chat(blocks(line, RULES)),
        lambda line: chat(line, RULES),
        lambda line: responses(f"{line}\n{RULES}"),
    ],
    ids=["blocks", "a text", "an empty line", "chat", "parts", "a message of its own", "instructions"],
)
def test_the_line_that_claude_code_bills_by_ends_no_reuse(tiny: Server, ask: Any, line: str) -> None:
    path, body = ask(line.format(1))
    n_tokens, _ = n_prompt(tiny, path, body)
    assert n_prompt(tiny, *ask(line.format(2)))[1] >= n_tokens - 1
    plain = {"/v1/messages": messages, "/v1/responses": responses}.get(path, chat)
    assert n_tokens == n_prompt(tiny, *plain(RULES))[0]


def test_text_right_after_the_line_stays(tiny: Server) -> None:
    """As where a proxy joins blocks without anything between them."""
    joined = n_prompt(tiny, *chat(LINE.format(1) + RULES))
    assert joined[0] == n_prompt(tiny, *chat(RULES))[0]


@pytest.mark.parametrize(
    "text",
    [f"What does this mean?\n{LINE.format(1)}", "x-anthropic-billing-header: is what I ask about."],
    ids=["within", "no values"],
)
def test_what_only_speaks_of_it_stays(tiny: Server, text: str) -> None:
    assert n_prompt(tiny, *chat(text))[0] > len(text) // 2
    assert n_prompt(tiny, *chat(LINE.format(3)))[0] < 60, "nothing else is in that message"


def test_counting_leaves_it_out_too(tiny: Server) -> None:
    def counted(system: Any) -> int:
        return tiny.post(messages(system)[1], "/v1/messages/count_tokens").json()["input_tokens"]

    assert counted(blocks(LINE.format(1), RULES)) == counted(RULES)
