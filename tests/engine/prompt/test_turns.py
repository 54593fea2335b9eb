"""Tests what becomes of turns that a chat template refuses or leaves out: each text and call reaches the prompt."""
# ruff: noqa: E501 (templates)

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cpuchat.engine.prompt.chat_template import ChatTemplate
from cpuchat.protocol.messages import EFFORTS, Message, Tool, ToolCall
from tests.engine.prompt.test_chat_template import rendering
from tests.support.engine_chat import system, user

_LOOP = "{% for m in messages %}"
_ONE = "[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]{{ m.content }}"
_CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
_END = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
_CHECKED = _LOOP + "CHECK" + _ONE + _CALLS + _END


def _refusing(condition: str) -> str:
    return _CHECKED.replace("CHECK", "{% if " + condition + " %}{{ raise_exception('no') }}{% endif %}")


_ALTERNATING = (
    "{% set ns = namespace(i=0) %}{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "permissive": _CHECKED.replace("CHECK", ""),
    "system first": _refusing("m.role == 'system' and not loop.first"),  # as Qwen3.5
    "no system": _refusing("m.role == 'system'"),  # as Gemma 2
    "drops systems": _LOOP + "{% if m.role != 'system' %}" + _ONE + _CALLS + "{% endif %}" + _END,
    "gathers systems": (  # as DeepSeek
        _LOOP + "{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        + _LOOP + "{% if m.role != 'system' %}" + _ONE + _CALLS + "{% endif %}" + _END
    ),
    "alternating": _ALTERNATING + _refusing("m.role == 'system' and not loop.first"),  # as Mistral
    "no empty answers": _refusing("m.role == 'assistant' and not (m.content or m.tool_calls)"),  # as Ministral
    "short ids": _refusing("m.tool_calls and m.tool_calls[0].id | length != 9"),  # as Mistral
    "ids as names": _CHECKED.replace("CHECK", "").replace("c.function.name", "c.id").replace("m.name", "0"),  # as Kimi
    "one call": _refusing("m.tool_calls and m.tool_calls | length != 1"),  # as Llama 3
    "first call": _CHECKED.replace("CHECK", "").replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),  # gpt-oss
    "text or call": _LOOP + "{% if m.tool_calls %}[assistant]" + _CALLS + "{% else %}" + _ONE + "{% endif %}" + _END,
    "one text beside a call": _refusing("m.tool_calls and m.content and m.thinking"),  # as gpt-oss
    "results after calls": (  # as MiniMax
        "{% set ns = namespace(called=false) %}" + _LOOP
        + "{% if m.role == 'tool' and not ns.called %}{{ raise_exception('no call') }}{% endif %}"
        "{% set ns.called = m.role == 'tool' or (m.tool_calls or []) | length > 0 %}" + _ONE + _CALLS + _END
    ),
    "asks for a user": "{% if not messages | selectattr('role', 'eq', 'user') | list %}{{ raise_exception('no user') }}{% endif %}"
    + _CHECKED.replace("CHECK", ""),
    "starts with a user": _refusing("loop.first and m.role == 'assistant'"),
}  # fmt: skip
"""What families of models insist on, one each."""


def answer(text: str = "", *calls: ToolCall, thought: str = "") -> Message:
    return Message(role="assistant", content=text, reasoning=thought, calls=calls)


def call(number: int, id: str = "") -> ToolCall:
    return ToolCall(name=f"look_{number}", arguments={"at": f"place {number}"}, id=id or f"Kq7mZp2x{number}")


def result(number: int, id: str = "", tool: str | None = None) -> Message:
    name = f"look_{number}" if tool is None else tool
    return Message(role="tool", content=f"seen {number}", call_id=id or f"Kq7mZp2x{number}", tool=name)


CHATS: dict[str, list[Message]] = {
    "plain": [system("rules"), user("one"), answer("two"), user("three")],
    "system in the middle": [user("one"), answer("two"), system("new rules"), user("three")],
    "two at the beginning, one later": [system("a"), system("b"), user("one"), answer("two"), system("c"), user("d")],
    "system at the end": [system("rules"), user("one"), answer("two"), system("new rules")],
    "only a system": [system("rules")],
    "the assistant begins": [system("rules"), answer("hello"), user("one")],
    "neighbors": [user("one"), user("two"), answer("three"), answer("four"), user("five")],
    "nothing said": [user("one"), answer(), user("two")],
    "a call": [user("one"), answer("", call(1)), result(1), answer("two"), user("three")],
    "text beside a call": [user("one"), answer("I look.", call(1)), result(1)],
    "text and reasoning beside a call": [user("one"), answer("I look.", call(1), thought="hm"), result(1)],
    "two calls": [user("one"), answer("", call(1), call(2)), result(1), result(2)],
    "an id of another program": [
        user("one"),
        answer("", call(1, "call_abc")),
        result(1, "call_abc"),
        answer("x"),
        user("y"),
    ],
    "a user after a result": [user("one"), answer("", call(1)), result(1), user("two")],
    "a user after a call": [user("one"), answer("", call(1)), user("two")],
    "a result after the user": [user("one"), answer("", call(1)), user("two"), result(1)],
    "a result without a call": [result(1, "gone", ""), user("one")],
    "nothing but a result": [system("rules"), result(1, "gone", "")],
    "a system message before the result": [user("one"), answer("", call(1)), system("new"), result(1), user("two")],
}
TOOLS = [Tool(name=f"look_{number}", description="Looks.") for number in (1, 2)]


@pytest.fixture(scope="module")
def template() -> Iterator[Callable[[str], ChatTemplate]]:
    with rendering() as make:
        yield make


@pytest.fixture(scope="module")
def templates(template: Callable[[str], ChatTemplate]) -> dict[str, ChatTemplate]:
    return {name: template(source) for name, source in TEMPLATES.items()}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_everything_said_and_called_reaches_the_prompt(
    templates: dict[str, ChatTemplate], name: str, chat: str
) -> None:
    text = templates[name].render(CHATS[chat], None, TOOLS if any(one.calls for one in CHATS[chat]) else ())
    at = 0
    for message in CHATS[chat]:
        if message.role != "tool" or chat != "two calls":  # which may be written one by one
            assert (at := text.find(message.content.strip(), at)) >= 0, (message.content, text)
        for one in message.calls:
            assert one.name in text and one.arguments["at"] in text
    assert all(message.content in text for message in CHATS[chat])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_is_rendered_the_same_in_every_later_request(templates: dict[str, ChatTemplate], name: str) -> None:
    chat = [
        system("rules"), user("one"), answer("I look.", call(1), thought="hm"), result(1), user("wait"), system("new"),
        answer("two"), answer("", call(1, "call_x"), call(2)), result(1, "call_x"), result(2), answer(""), user("three"),
    ]  # fmt: skip
    if name == "gathers systems":
        chat = chat[1:]
    before = ""
    for n in range(2, len(chat) + 1):
        if chat[n - 1].role == "user" and (n == len(chat) or chat[n].role != "user"):  # where a request may end
            text = templates[name].render(chat[:n], None, TOOLS)
            assert text.startswith(before.removesuffix("[assistant]")), (before, text)
            before = text


def test_text_beside_a_call_for_which_a_template_has_no_place_is_left_out(
    template: Callable[[str], ChatTemplate],
) -> None:
    """A template that alternates, and writes a text or a call: Mistral Nemo's."""
    text = template(_ALTERNATING + TEMPLATES["text or call"]).render(CHATS["text beside a call"], None, TOOLS)
    assert "look_1" in text and "seen 1" in text and "I look." not in text


def test_what_a_template_takes_is_left_as_it_is(templates: dict[str, ChatTemplate]) -> None:
    text = templates["permissive"].render(CHATS["two at the beginning, one later"])
    assert text == "[system]a[system]b[user]one[assistant]two[system]c[user]d[assistant]"


EFFORT = "{{ messages[0].content }}|{{ reasoning_effort if reasoning_effort is defined else 'default' }}"
STRICT_EFFORT = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'high', 'no_think'] %}"
    "{{ raise_exception('no such effort') }}{% endif %}" + EFFORT
)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (EFFORT, ["low", "low", "low", "medium", "high", "high", "high"]),
        (EFFORT + "{# 'none' 'max' #}", ["none", "low", "low", "medium", "high", "max", "max"]),
        (STRICT_EFFORT, ["no_think", "low", "low", "high", "high", "high", "high"]),
        (
            EFFORT.replace("reasoning_effort", "reasoning_strength"),
            ["low", "low", "low", "medium", "high", "high", "high"],
        ),
        ("{{ messages[0].content }}|{{ thinking_budget }}", [str(one) for one in EFFORTS.values()]),
    ],
    ids=["gpt-oss", "more words", "Hy3", "Muse Glimmer", "Seed-OSS"],
)
def test_an_effort_reaches_the_template_in_the_nearest_word_that_it_takes(
    template: Callable[[str], ChatTemplate], source: str, words: list[str]
) -> None:
    one = template(source)
    assert one.takes_effort
    assert [one.render([user("Q")], None, (), effort).removeprefix("Q|") for effort in EFFORTS] == words
