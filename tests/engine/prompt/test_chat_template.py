from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cpuchat.base.errors import TemplateError
from cpuchat.engine.prompt import chat_template
from cpuchat.engine.prompt.chat_template import ChatTemplate, TemplateHelper
from cpuchat.protocol.messages import Message, Tool, ToolCall
from cpuchat.tools.call_format import GENERIC
from cpuchat.tools.call_parser import parse_calls
from tests.support.chatting import children
from tests.support.engine_chat import assistant, system, user
from tests.support.tiny_gguf import CHATML

STRICT = """\
{{- bos_token }}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate user/assistant!') }}
{%- endif %}
{{- '[' + message.role + ']' + message.content | trim }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}
"""


@contextlib.contextmanager
def rendering() -> Iterator[Callable[[str], ChatTemplate]]:
    """Yield what makes chat templates; their processes end afterwards."""
    with contextlib.ExitStack() as helpers:

        def make(source: str) -> ChatTemplate:
            return ChatTemplate(helpers.enter_context(contextlib.closing(TemplateHelper(source))), "<s>", "</s>")

        yield make


@pytest.fixture
def template():
    with rendering() as make:
        yield make


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        (CHATML, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        # A system message is not lost where the template refuses or drops it.
        (STRICT, "<s>[user]Be brief.\n\nHi"),
        ("{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}",
         "[user]Be brief.\n\nHi"),
        # Content as parts, and a list of tools.
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}", "Be brief.;Hi;"),
        ("{% for t in tools %}{% endfor %}{{ messages[0].content }}", "Be brief.\n\nHi"),
    ],
)  # fmt: skip
def test_renders_the_models_own_format(template, source, rendered):
    assert template(source).render([system("Be brief."), user("Hi")]) == rendered


def test_neighbours_of_the_same_role_are_merged_only_where_the_template_minds(template):
    messages = [user("one"), user("two"), assistant("a", "r1"), assistant("b"), user("three")]
    assert template(STRICT).render(messages) == "<s>[user]one\n\ntwo[assistant]a\n\nb</s>[user]three"
    assert template(CHATML).render(messages).count("<|im_start|>") == 6


def test_a_refusal_that_stays_is_told_in_the_templates_words(template):
    short = (
        "{% if messages | length > 1 %}{{ raise_exception('One message only!') }}{% endif %}{{ messages[0].content }}"
    )
    with pytest.raises(TemplateError, match="One message only!"):
        template(short).render([user("one"), assistant("two")])


def test_reasoning_goes_to_templates_that_ask(template):
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }};{% endfor %}"
    assert template(source).render([user("q"), assistant("a", "hm")]) == "||q;hm|hm|a;"


def test_reasoning_is_asked_for_in_the_words_of_the_template(template):
    for name in ("enable_thinking", "thinking"):
        one = template(f"{{{{ messages[0].content }}}}|{{{{ {name} if {name} is defined else 'default' }}}}")
        assert [one.render([user("Q")], choice) for choice in (None, True, False)] == ["Q|default", "Q|True", "Q|False"]


def test_helpers_that_templates_use(template):
    source = (
        "{% generation %}{{ {'a': '<é>'} | tojson }}{% endgeneration %}"
        "{{ strftime_now('%Y') }}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ messages[0].content }}{{ tools is none }}{{ undefined_name is defined }}"
    )
    assert re.fullmatch(r'\{"a": "<é>"\}\d{4}01HiTrueFalse', template(source).render([user("Hi")]))


def test_text_of_any_kind_survives(template):
    text = "{{ 7*7 }} {% raw %} <b> 🙂 \x1b[31m \u2028 \ud800".encode("utf-8", "replace").decode()
    assert text in template(CHATML).render([user(text)])
    long = "x" * 3_000_000
    assert long in template(CHATML).render([user(long)])


REFUSED = {
    "internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "internals by attr": "{{ messages|attr('__class__') }}{{ ''['__class__'].mro() }}",
    "format string": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "globals of a helper": "{{ raise_exception.__globals__.keys() }}",
    "changes its input": "{{ messages.append(1) }}",
    "changes its input by another name": "{% set n = namespace(m=messages) %}{{ n.m.pop() }}",
    "file": "{% include '/etc/passwd' %}",
    "huge range": "{% for a in range(10**9) %}{% endfor %}",
    "wide": "{{ 'a' | center(10 ** 10) }}",
    "format width": "{{ '%1000000000d' % 1 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "division": "{{ 1 / 0 }}",
    "escape sequences in its error": "{{ raise_exception('\x1b[31mred\n\nred') }}",
}
"""What the sandbox refuses, or fails in it; the process goes on."""

HOSTILE = {
    "long loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "big string": "{{ ('a' * 10**9) | length }}",
    "nesting": "{% set n = namespace(s=1) %}{% for i in range(60) %}{% set n.s = (n.s, n.s) %}{% endfor %}{{ n.s }}",
    "long output": "{% for a in range(99999) %}{% for b in range(99999) %}aaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
    "deep nesting": "{{ " + "(" * 20_000 + ")" * 20_000 + " }}",
    "unknown filter": "{{ messages | exec }}",
    "too long": "a" * 2_000_000,
}


def test_a_template_changes_the_lists_that_it_makes(template):
    source = "{% set n = namespace(q=[]) %}{% set _ = n.q.append(messages[0].content) %}{{ n.q.pop(0) }}{{ n.q }}"
    assert template(source).render([user("Hi")]) == "Hi[]"


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a template compute for a second, not for three."""
    source = Path(chat_template.__file__).with_name("template_process.py").read_text()
    assert "\nMAX_CPU_SECONDS = 2\n" in source
    (tmp_path / "template_process.py").write_text(source.replace("\nMAX_CPU_SECONDS = 2\n", "\nMAX_CPU_SECONDS = 0\n"))
    monkeypatch.setattr(chat_template, "__file__", str(tmp_path / "template_helper.py"))


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_give_a_typed_error(template, source):
    check_failure(template(source), "Hi")


def test_what_a_template_may_not_do_is_a_typed_error_too(template):
    """All in one template, which does what the message names."""
    branches = "".join(f"{{% elif asked == '{name}' %}}{source}" for name, source in REFUSED.items())
    chat = template(f"{{% set asked = messages[0].content %}}{{% if asked == 'Hi' %}}Hi{branches}{{% endif %}}")
    for name in REFUSED:
        check_failure(chat, name)
        assert chat.render([user("Hi")]) == "Hi"


def check_failure(chat: ChatTemplate, text: str) -> None:
    """Assert that rendering a message fails with a typed error."""
    with pytest.raises(TemplateError) as caught:
        chat.render([user(text)])
    assert caught.value.hint
    assert str(caught.value).isprintable()
    assert "<class" not in str(caught.value)


def test_a_template_that_dies_of_one_conversation_serves_the_next(template):
    chat = template("{% if messages | length > 1 %}{{ 'a' * 10**10 }}{% endif %}{{ messages[0].content }}")
    assert chat.render([user("one")]) == "one"
    with pytest.raises(TemplateError):
        chat.render([user("one"), assistant("two")])
    assert chat.render([user("three")]) == "three"


def test_closing_ends_the_helper_and_a_later_call_starts_it_again():
    before = children()
    helper = TemplateHelper(CHATML)
    chat = ChatTemplate(helper, "", "")
    chat.render([user("Hi")])
    (pid,) = children() - before
    helper.close()
    assert not psutil.pid_exists(pid)
    helper.close()
    assert chat.render([user("Hi")])
    helper.close()


def test_warming_up_hides_no_error():
    """Compiling begins before anything is to be rendered, and nobody waits for it."""
    with contextlib.closing(TemplateHelper("{% if %}")) as helper:
        helper.warm_up()
        with pytest.raises(TemplateError, match="invalid"):
            ChatTemplate(helper, "", "").render([user("Hi")])


WITH_TOOLS = """\
{%- if tools %}{{- '<tools>' + tools | tojson + '</tools>' }}{%- endif %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set f = call.function %}
{{- '<tool_call>{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
LOOK = Tool(name="look", description="Look at it.", parameters={"type": "object", "properties": {"at": {}}})
CALLED = [
    user("What?"),
    Message(role="assistant", content="", calls=(ToolCall(name="look", arguments={"at": "ü"}, id="c00000001"),)),
    Message(role="tool", content="seen", call_id="c00000001", tool="look"),
]


def test_tools_and_calls_are_rendered_as_the_template_does(template) -> None:
    chat = template(WITH_TOOLS)
    text = chat.render(CALLED, tools=[LOOK])
    assert text.startswith('<tools>[{"type": "function", "function": {"name": "look"')
    call = '<tool_call>{"name": "look", "arguments": {"at": "ü"}}</tool_call>'
    assert text.endswith(f"<|user|>What?<|end|><|assistant|>{call}<|end|><|tool|>seen<|end|><|assistant|>")
    assert parse_calls(chat.call_format, call, [LOOK]) == ("", [ToolCall(name="look", arguments={"at": "ü"})])


def test_a_template_without_tools_gets_them_as_text(template) -> None:
    chat = template(CHATML)
    assert chat.call_format is GENERIC
    text = chat.render([system("Be brief."), *CALLED], tools=[LOOK])
    system_turn, user_turn, assistant_turn, result, _ = text.split("<|im_end|>\n")
    assert system_turn.startswith("<|im_start|>system\nBe brief.\n\nYou can call") and '"Look at it."' in system_turn
    assert assistant_turn.endswith('<tool_call>\n{"name": "look", "arguments": {"at": "ü"}}\n</tool_call>')
    assert result == "<|im_start|>user\n<tool_response>\nseen\n</tool_response>"
    assert user_turn == "<|im_start|>user\nWhat?"
    assert chat.render([user("Hi")]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
