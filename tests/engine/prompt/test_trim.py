from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.base.errors import ContextFull
from cpuchat.engine.prompt.prompt_builder import require_room_for_last, trim_messages
from cpuchat.protocol.messages import Message


class Counter:
    """One token per character, two per message."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, messages: list[Message]) -> int:
        self.calls += 1
        return sum(2 + len(m.content) for m in messages)


def turns(n: int) -> list[Message]:
    return [Message(role=role, content=str(i).ljust(8, ".")) for i in range(n) for role in ("user", "assistant")]


def test_oldest_turns_go_and_the_system_message_stays():
    system = Message(role="system", content="short")
    messages = [system, *turns(10), Message(role="user", content="and now?")]
    count = Counter()
    result = trim_messages(count, messages, 100)
    assert result.messages[0] is system
    assert result.messages[1].role == "user"
    assert result.messages[-1] is messages[-1]
    assert count(result.messages) <= 100
    assert result.dropped_messages == len(messages) - len(result.messages) > 0
    assert result.dropped_tokens == count(messages) - count(result.messages)


def test_few_calls_for_a_long_chat():
    count = Counter()
    trim_messages(count, turns(5000), 1000)
    assert count.calls <= 16


def test_the_beginning_stays_the_same_for_several_turns():
    messages = turns(100)
    firsts = [trim_messages(Counter(), messages[: 2 * n - 1], 400).messages[0].content for n in range(30, 60)]
    assert len(set(firsts)) <= 8


def test_the_last_message_alone_may_have_more_than_the_budget():
    messages = [*turns(5), Message(role="user", content="x" * 108)]
    assert trim_messages(Counter(), messages, 100, limit=110).messages == messages[-1:]
    with pytest.raises(ContextFull, match="110 tokens, but the context has room for 109"):
        trim_messages(Counter(), messages, 100, limit=109)


def test_too_long_a_message_is_refused_with_the_arithmetic():
    messages = [Message(role="system", content="s" * 48), *turns(2), Message(role="user", content="x" * 1998)]
    with pytest.raises(ContextFull, match=r"2,050 tokens \(50 of them for the system prompt\).*room for 1,024"):
        trim_messages(Counter(), messages, 1024)
    with pytest.raises(ContextFull, match="2,000 tokens, but the context"):
        trim_messages(Counter(), messages[-1:], 1024)
    with pytest.raises(ContextFull, match="room for 0"):
        trim_messages(Counter(), messages, -5)


def test_the_last_message_is_refused_only_if_it_does_not_fit_alone():
    messages = [Message(role="system", content="s" * 48), *turns(40), Message(role="user", content="x" * 98)]
    require_room_for_last(Counter(), messages, 150)
    with pytest.raises(ContextFull, match=r"150 tokens \(50 of them for the system prompt\).*room for 149") as caught:
        require_room_for_last(Counter(), messages, 149)
    assert caught.value.alone


roles = st.sampled_from(["user", "assistant", "system"])
chats = st.lists(st.builds(Message, role=roles, content=st.text(alphabet="ab", max_size=40)), min_size=1, max_size=30)


@given(chats, st.integers(0, 400))
def test_any_chat(messages, budget):
    count = Counter()
    try:
        result = trim_messages(count, messages, budget)
    except ContextFull:
        users = [i for i, m in enumerate(messages) if m.role == "user"]
        least = users[-1] if users else 0
        assert count([m for i, m in enumerate(messages) if i >= least or m.role == "system"]) > budget
        return
    assert count(result.messages) <= budget
    assert result.dropped_messages + len(result.messages) == len(messages)
    assert [m for m in messages if m.role == "system"] == [m for m in result.messages if m.role == "system"]
    others = [m for m in result.messages if m.role != "system"]
    if result.dropped_messages:
        assert others[0].role == "user"
        assert others == [m for m in messages if m.role != "system"][-len(others) :]
