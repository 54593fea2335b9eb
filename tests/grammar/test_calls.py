"""Tests that the grammar of calls allows what chat templates write."""

from __future__ import annotations

from cpuchat.tools.call_grammar import call_grammar
from cpuchat.tools.call_parser import parse_calls
from tests.grammar.conftest import matcher
from tests.tools.llama_calls import learned, recording

CASES = ("two calls", "nested", "no arguments")


def test_calls_in_the_forms_of_real_templates_are_allowed() -> None:
    tools = recording().tools[0]
    refused = list[tuple[str, str, str]]()
    compared = set[tuple[str, str]]()  # some templates are of one form
    for name, recorded in recording().templates.items():
        form = learned(name)
        grammar = call_grammar(form, tools)
        for output in (one for one in recorded.outputs if one.name in CASES):
            text = output.text[max(0, form.find(output.text, [tool.name for tool in tools])) :].strip()
            if (grammar, text) in compared:
                continue
            compared.add((grammar, text))
            allowed = _allowed(grammar, text)
            _, calls = parse_calls(form, allowed, tools)  # what ends all calls may end the answer
            if len(calls) < len(output.expected.calls):
                refused.append((name, allowed, text))
    assert refused == []


def _allowed(grammar: str, text: str) -> str:
    """Return the beginning that a grammar allows, byte by byte, up to where it may end."""
    one, data, end = matcher(grammar), text.encode(), 0
    for at, byte in enumerate(data, 1):
        if one.try_consume_tokens([byte]) != 1:
            break
        end = at if one.is_accepting() else end
    return data[:end].decode()
