"""Turns that chat templates refuse or leave out, and the nearest that each template can express.

Programs send system messages in the middle, results without calls, text beside calls. What a template makes of each is
found out once, with a probe: a message is then rendered the same in every later request, and its state is reused.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from msgspec.structs import replace

from cpuchat.protocol.messages import Message, ToolCall

Fold = Callable[[Sequence[Message]], Iterator[Message]]
"""Gives the messages, some written in another way; those that it does not concern are the same objects."""


class TurnFitter:
    """Writes messages as one template can express them. `accepts`: returns whether the template renders messages with
    all their texts and calls, the texts in their order."""

    def __init__(self, accepts: Callable[[Sequence[Message]], bool]) -> None:
        self._accepts = accepts
        self._chosen: dict[int, Fold | None] = {}

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages, changed only where the template does not take them."""
        found = [_as_text(one) if one.role == "tool" and not one.tool else one for one in messages]
        for number, (probe, *folds) in enumerate(_LADDER):
            if all(list(fold(found)) == found for fold in folds):
                continue
            if number not in self._chosen:
                usable = (fold for fold in folds if self._accepts(list(fold(probe))))
                self._chosen[number] = None if self._accepts(probe) else next(usable, None)
            if (chosen := self._chosen[number]) is not None:
                found = list(chosen(found))
        return found


def _as_text(result: Message) -> Message:
    return Message(role="user", content=f"<tool_result>\n{result.content}\n</tool_result>")


def _stray_results_as_text(messages: Sequence[Message]) -> Iterator[Message]:
    """Write results that do not directly follow their call as text."""
    called = set[str]()
    for one in messages:
        if one.role != "tool":
            called = {call.id for call in one.calls}
        is_stray = one.role == "tool" and called.isdisjoint(("", one.call_id))
        yield _as_text(one) if is_stray else one


def _with_ids(id_of: Callable[[ToolCall, int], str]) -> Fold:
    """Return a fold that gives a call another id, from the call and its number."""

    def fold(messages: Sequence[Message]) -> Iterator[Message]:
        n, ids = 0, dict[str, str]()
        for one in messages:
            calls = tuple(replace(call, id=id_of(call, at)) for at, call in enumerate(one.calls, n))
            ids |= {old.id: new.id for old, new in zip(one.calls, calls, strict=True)}
            n += len(calls)
            new = replace(one, calls=calls, call_id=ids.get(one.call_id, one.call_id))
            yield one if new == one else new

    return fold


def _short_id(call: ToolCall, _: int) -> str:
    """Return nine letters and digits, on which Mistral's templates insist."""
    is_short = re.fullmatch("[0-9A-Za-z]{9}", call.id) is not None
    return call.id if is_short else hashlib.sha256(call.id.encode("utf-8", "replace")).hexdigest()[:9]


def _naming_id(call: ToolCall, number: int) -> str:
    """Return an id that names the tool, which Kimi's templates render in place of the name."""
    return f"functions.{call.name}:{number}"


def _one_call_a_turn(messages: Sequence[Message]) -> Iterator[Message]:
    """Write several calls of an answer one after the other, each with its result."""
    at = 0
    while at < len(messages):
        one, at = messages[at], at + 1
        if len(one.calls) < 2:
            yield one
            continue
        results = list[Message]()
        while at < len(messages) and messages[at].role == "tool":
            results.append(messages[at])
            at += 1
        for number, call in enumerate(one.calls):
            yield replace(one if not number else Message(role="assistant", content=""), calls=(call,))
            if (result := next((r for r in results if r.call_id == call.id), None)) is not None:
                results.remove(result)
                yield result
        yield from results


def _thought_in_text(messages: Sequence[Message]) -> Iterator[Message]:
    """Put the reasoning before a call into the text beside it."""
    for one in messages:
        is_both = one.calls and one.content and one.reasoning
        yield replace(one, content=f"{one.reasoning}\n\n{one.content}", reasoning="") if is_both else one


def _text_before_call(messages: Sequence[Message]) -> Iterator[Message]:
    """Give the text beside a call a turn of its own."""
    for one in messages:
        if one.calls and one.content:
            yield replace(one, calls=())
            one = replace(one, content="", reasoning="")
        yield one


def _leading(messages: Sequence[Message]) -> int:
    """Return how many messages of the system come first."""
    return next((n for n, one in enumerate(messages) if one.role != "system"), len(messages))


def _system_into_user(messages: Sequence[Message]) -> Iterator[Message]:
    n = _leading(messages)
    if n:
        is_user = n < len(messages) and messages[n].role == "user"
        yield Message(role="user", content="\n\n".join(one.content for one in messages[: n + is_user]))
        n += is_user
    yield from messages[n:]


def _later_system_as_user(messages: Sequence[Message]) -> Iterator[Message]:
    n = _leading(messages)
    for at, one in enumerate(messages):
        is_later = at > n and one.role == "system"
        yield Message(role="user", content=f"<system>\n{one.content}\n</system>") if is_later else one


def _user_first(messages: Sequence[Message]) -> Iterator[Message]:
    n = _leading(messages)
    yield from messages[:n]
    if n == len(messages) or messages[n].role != "user":
        yield Message(role="user", content="")
    yield from messages[n:]


def _answer_before_user(messages: Sequence[Message]) -> Iterator[Message]:
    """Put an empty answer between a call, or its result, and what the user says next."""
    is_open = False
    for one in messages:
        if one.role == "user" and is_open:
            yield Message(role="assistant", content=" ")
        is_open = one.role == "tool" or bool(one.calls)
        yield one


def _space_for_nothing(messages: Sequence[Message]) -> Iterator[Message]:
    for one in messages:
        is_empty = one.role == "assistant" and not (one.content or one.calls)
        yield replace(one, content=" ") if is_empty else one


def _merged(role: str) -> Fold:
    """Return a fold that merges neighbors of this role, but for what follows a call."""

    def fold(messages: Sequence[Message]) -> Iterator[Message]:
        last: Message | None = None
        for one in messages:
            if last is not None and last.role == one.role == role and not last.calls:
                content, reasoning = (
                    "\n\n".join(filter(None, parts))
                    for parts in ((last.content, one.content), (last.reasoning, one.reasoning))
                )
                one = replace(one, content=content, reasoning=reasoning)
            elif last is not None:
                yield last
            last = one
        if last is not None:
            yield last

    return fold


_ROLES: Final[dict[str, Any]] = {"s": "system", "u": "user", "a": "assistant"}


def _chat(roles: str) -> list[Message]:
    return [Message(role=_ROLES[one], content=f"{one}-probe-{at}") for at, one in enumerate(roles)]


def _called(n: int, id: str = "Kq7mZp2x", said: str = "", thought: str = "") -> list[Message]:
    """Return a question, an answer with `n` calls, and their results."""
    calls = tuple(
        ToolCall(name=f"probe_tool_{at}", arguments={"at": f"at-probe-{at}"}, id=f"{id}{at}") for at in range(n)
    )
    results = (Message(role="tool", content=f"r-probe-{one.id}", call_id=one.id, tool=one.name) for one in calls)
    return [*_chat("u"), Message(role="assistant", content=said, reasoning=thought, calls=calls), *results]


_LADDER: Final[tuple[tuple[Any, ...], ...]] = (
    ([*_called(1)[:2], *_chat("u"), *_called(1)[2:]], _stray_results_as_text),
    (_called(1, id="call_probe:"), _with_ids(_short_id), _with_ids(_naming_id)),
    (_called(2), _one_call_a_turn),
    (_called(1, said="said-probe", thought="thought"), _thought_in_text, _text_before_call),
    (_chat("ssu"), _merged("system")),
    (_chat("su"), _system_into_user),
    (_chat("uas"), _later_system_as_user),
    (_chat("s"), _user_first),
    (_chat("au"), _user_first),
    ([*_called(1), *_chat("ua")[:1]], _answer_before_user),
    ([*_chat("u"), Message(role="assistant", content=""), *_chat("u")], _space_for_nothing),
    (_chat("uu"), _merged("user")),
    (_chat("uaau"), _merged("assistant")),
)
"""A probe, and what may be done with messages like it, the smaller change first."""
