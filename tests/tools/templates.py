"""Chat templates that render calls of tools, in the ways of the families of models that are about."""
# ruff: noqa: E501 (templates)

from __future__ import annotations

import json
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cpuchat.base.errors import TemplateError

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _chatml(call: str, before: str = "", after: str = "", between: str = "") -> str:
    """Return a ChatML template that renders each call as `call`, a template of `c.function`."""
    loop = (
        "{% if m.tool_calls %}" + before + "{% endif %}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + call
        + ("{% if not loop.last %}" + between + "{% endif %}" if between else "")
        + "{% endfor %}{% if m.tool_calls %}" + after + "{% endif %}"
    )  # fmt: skip
    return _CHATML.replace("{% for c in m.tool_calls or [] %}CALL{% endfor %}", loop)


TEMPLATES: dict[str, str] = {
    "hermes": _chatml('\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'),
    "mistral-nemo": (
        "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('Ids have 9 characters') }}{% endif %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "mistral-new": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
        "{{ c.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"
    ),
    "llama-3": (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
        "{{ raise_exception('One call at a time') }}{% endif %}"
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
        "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "command": _chatml(
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        before="<|START_ACTION|>[\n",
        after="\n]<|END_ACTION|>",
        between=",\n",
    ),
    "deepseek": (  # arguments are text
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜></think>"
        "{% else %}{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
        "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
        "{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    ),
    "kimi": _chatml(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "glm": (  # a block of reasoning that is empty stands before all that is said
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% else %}<|assistant|>\n<think></think>"
        "{% if m.content %}\n{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n<think>{% endif %}"
    ),
    "qwen-coder": _chatml(
        "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "minimax": _chatml(
        '<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<parameter name="{{ k }}">'
        "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n",
        before="\n<minimax:tool_call>\n",
        after="</minimax:tool_call>",
    ),
    "gemma": _chatml(
        '<|tool_call>call:{{ f.name }}{{ "{" }}{% for k, v in f.arguments.items() %}{{ k }}:'
        '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
        '{% if not loop.last %},{% endif %}{% endfor %}{{ "}" }}<tool_call|>'
    ),
    "python": _chatml(
        "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %})",
        before="[",
        after="]",
        between=", ",
    ),
}
WITHOUT = _CHATML.replace("{% for c in m.tool_calls or [] %}CALL{% endfor %}", "")


def render(source: str, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    """Render a template as the engine's helper process does."""

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = fail
    try:
        template = environment.from_string(source)
        return template.render(messages=messages, add_generation_prompt=add_generation_prompt)
    except (jinja2.TemplateError, TypeError) as error:
        raise TemplateError(str(error)) from None
