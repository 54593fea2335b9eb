"""Chat templates that render calls of tools, in two ways."""

from __future__ import annotations


def _chatml(call: str) -> str:
    """Return a ChatML template that renders each call as `call`, a template of `f`."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + call + "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


TEMPLATES = {
    "hermes": _chatml('\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'),
    "qwen-coder": _chatml(
        "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
}
