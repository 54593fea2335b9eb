"""Tests what is left out when a chat outgrows the context of a server."""

from __future__ import annotations

from typing import Any

import pytest

from cpuchat.protocol.messages import ContextTrimmed
from tests.support.chatting import chat, collect
from tests.support.remote_server import Reply, connected


def rejecting(limit: int, words: str) -> Any:
    """Answer as vLLM does: the prompt, of 100 tokens a message, and Max tokens must fit in the context."""

    async def answer(reply: Reply) -> None:
        needed, output = 100 * len(reply.asked.body["messages"]), reply.asked.body.get("max_tokens", 0)
        if needed + output > limit:
            said = words.format(limit=limit, needed=needed, output=output, total=needed + output)
            if not output:
                said = f"This model's maximum context length is {limit} tokens. Your request has {needed} input tokens."
            await reply.json({"error": {"message": said}}, 400)
        else:
            await reply.whole("Fine.")

    return answer


VLLM = [
    "This model's maximum context length is {limit} tokens. However, you requested {output} output tokens and your "
    "prompt contains at least {needed} input tokens, for a total of at least {total} tokens.",
    "This model's maximum context length is {limit} tokens. However, you requested {total} tokens "
    "({needed} in the messages, {output} in the completion). Please reduce the length of the messages or completion.",
    "'max_tokens' or 'max_completion_tokens' is too large: {output}. This model's maximum context length is {limit} "
    "tokens and your request has {needed} input tokens ({output} > {limit} - {needed}).",
]


@pytest.mark.parametrize("words", VLLM)
async def test_a_prompt_that_is_too_long_for_vllm_is_told_from_max_tokens_and_trimmed_by_its_own_length(
    words: str,
) -> None:
    async with connected(rejecting(1_024, words), owner="vllm") as (server, backend):
        got = await collect(backend.generate(chat("one", "two", "three", max_tokens=2_000)))
        assert got.text == "Fine." and not got.of(ContextTrimmed)
        first, last = (server.chats()[at].body for at in (0, -1))
        assert len(last["messages"]) == len(first["messages"]) and "max_completion_tokens" not in last
        long = [f"message {n}" for n in range(15)]
        got = await collect(backend.generate(chat(*long, max_tokens=50)))
        [trimmed] = got.of(ContextTrimmed)
        assert got.text == "Fine." and trimmed.n_ctx == 1_024 and server.chats()[-1].body["max_tokens"] == 50
        whole = await collect(backend.generate(chat(*long, when_full="refuse")))
        assert whole.failed.code == "context_full" and not whole.failed.alone
