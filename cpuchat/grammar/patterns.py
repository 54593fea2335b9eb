"""Turns a regular expression into a grammar for the JSON string whose text it matches.

Python's parser reads the expression; what it has beyond the dialect of JSON Schema (ECMA 262) is refused, and so is
what a grammar cannot say. `\\d`, `\\w` and `\\s` are ASCII, as in ECMA 262. A character that JSON writes as an escape
is written as one, so the result is valid JSON even where a dot matches a quotation mark.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable
from typing import Any, Final

from cpuchat.grammar.characters import LAST, MOST_RANGES, Ranges, character_class, without
from cpuchat.grammar.rules import NOT_IN_STRINGS, Rules

_parser: Any = importlib.import_module("re._parser")

_ESCAPES: Final = {0x22: '"', 0x5C: "\\\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_SETS: Final[dict[str, Ranges]] = {
    "DIGIT": [(0x30, 0x39)],
    "WORD": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "SPACE": [(0x09, 0x0D), (0x20, 0x20)],
}
_LINE_ENDS: Final = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_UNSUPPORTED: Final = {
    "ASSERT": "a lookaround",
    "ASSERT_NOT": "a lookaround",
    "GROUPREF": "a back reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
    "AT": "an anchor inside the pattern, or a word boundary,",
}
_MAX_DEPTH: Final = 50


def pattern_expression(pattern: str, rules: Rules, name: str) -> str:
    """Return an expression for what stands between the quotation marks. Without anchors, any text may surround it.

    Raises:
        ValueError: not a regular expression, or one that a grammar cannot say; the message completes "the pattern ...".
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sets that may mean something else one day
            tree = _parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise ValueError(f"is not a regular expression that can be used: {error}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if tree.state.flags & ~re.UNICODE:
        raise ValueError("has inline flags, which are not supported")
    items = list(tree)
    begins = bool(items) and _is_anchor(items[0], "BEGINNING")
    items = items[begins:]
    ends = bool(items) and _is_anchor(items[-1], "END")
    items = items[: len(items) - ends]
    anything = "" if begins and ends else f"{rules.built_in('char')}*"
    body = _Writer(rules, name).sequence(items, 0)
    parts = ("" if begins else anything, f"({body})", "" if ends else anything)
    return " ".join(filter(None, parts))


def _is_anchor(item: tuple[Any, Any], where: str) -> bool:
    return item[0].name == "AT" and item[1].name in (f"AT_{where}", f"AT_{where}_STRING")


class _Writer:
    def __init__(self, rules: Rules, name: str) -> None:
        self._rules = rules
        self._name = name

    def sequence(self, items: Iterable[tuple[Any, Any]], depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise ValueError("is nested too deeply")
        return " ".join(self._item(op.name, value, depth + 1) for op, value in items) or '""'

    def _item(self, op: str, value: Any, depth: int) -> str:
        match op:
            case "LITERAL":
                return _character([(value, value)])
            case "NOT_LITERAL":
                return _character(without([(0, LAST)], [(value, value)]))
            case "ANY":
                return _character(without([(0, LAST)], _LINE_ENDS))
            case "IN":
                return _character(_class(value))
            case "BRANCH":
                return f"({' | '.join(self.sequence(branch, depth) for branch in value[1])})"
            case "SUBPATTERN":
                _, added, removed, inner = value
                if added or removed:
                    raise ValueError("has inline flags, which are not supported")
                return f"({self.sequence(inner, depth)})"
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                rule = self._rules.add(f"{self._name}-part", self.sequence(inner, depth))
                return self._rules.repeat(rule, least, None if most == _parser.MAXREPEAT else most)
        raise ValueError(f"has {_UNSUPPORTED.get(op, op.lower())} which a grammar cannot express")


def _class(items: Iterable[tuple[Any, Any]]) -> Ranges:
    ranges: Ranges = []
    negated = False
    for op, value in items:
        match op.name:
            case "LITERAL":
                ranges.append((value, value))
            case "RANGE":
                ranges.append(value)
            case "NEGATE":
                negated = True
            case _:
                kind = value.name.removeprefix("CATEGORY_")
                known = _SETS[kind.removeprefix("NOT_")]
                ranges += without([(0, LAST)], known) if kind.startswith("NOT_") else known
    return without([(0, LAST)], ranges) if negated else ranges


def _character(ranges: Ranges) -> str:
    """Return an expression for one character of a JSON string out of `ranges`."""
    parts: list[str] = []
    plain = without(ranges, NOT_IN_STRINGS)
    if len(plain) > MOST_RANGES:
        raise ValueError(f"has a class of more than {MOST_RANGES:,} ranges")
    if plain:
        parts.append(character_class(plain))
    escaped = "".join(text for code, text in _ESCAPES.items() if any(low <= code <= high for low, high in ranges))
    if escaped:
        parts.append(f'"\\\\" [{escaped}]')
    if not parts:
        raise ValueError("asks for a character that JSON strings do not have")
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"
