"""Builds the rules of a grammar: those that every JSON text uses, choices, numbers within bounds, regular expressions.

White space is free to a point: a model that may write it endlessly sometimes does.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from cpuchat.grammar.gbnf import LAST, MAX_RANGES, MAX_REPETITIONS, MAX_WAYS, ROOT, Ranges, merged, without

_LONGEST: Final = 10_000
"""The longest string or array with a limit; a higher limit counts as this one."""

_MANY: Final = 20
SPACE: Final = "space"
_HEX = "[0-9a-fA-F]"
# Line separators are not for every reader, surrogates could stand alone.
NOT_IN_STRINGS: Final = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F), (0x2028, 0x2029), (0xD800, 0xDFFF))
_IN_TEXTS: Final = ((0x09, 0x0A), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, LAST))
_BUILT_IN: Final = {
    "space": r'| " " | "\n"{1,2} [ \t]{0,20}',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "integral": "[0] | [1-9] [0-9]{0,15}",
    "integer": '"-"? integral',
    "number": '"-"? integral ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    # Ranges, because llama.cpp lets a negated class match invalid UTF-8.
    "char": r'[ !#-\[\]-~\u0080-\u2027\u202A-\uD7FF\uE000-\U0010FFFF] | "\\" (["\\/bfnrt] | "u" unicode)',
    "unicode": f"[0-9a-cA-CefEF] {_HEX}{{3}} | [dD] [0-7] {_HEX}{{2}}",
    "string": r'"\"" char* "\""',
    "pair": 'string ":" space value',
    "object": '"{" space (pair ("," space pair)* space)? "}"',
    "array": '"[" space (value ("," space value)* space)? "]"',
    "value": "object | array | string | number | boolean | null",
    "date": '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])',
    "time": '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{3})? '
    '("Z" | [+-] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])',
    "uuid": ' "-" '.join(f"{_HEX}{{{n}}}" for n in (8, 4, 4, 4, 12)),
}
_WORD = re.compile(r"(?<![\w\\-])[a-z]+(?![\w-])")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')


def literal(text: str) -> str:
    """Return `text` as a GBNF literal."""
    escapes = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return '"' + "".join(escapes.get(c) or (c if c >= " " else f"\\x{ord(c):02X}") for c in text) + '"'


def character_class(ranges: Ranges) -> str:
    """Return the class of GBNF for one character out of `ranges`."""
    return f"[{''.join(_range(low, high) for low, high in ranges)}]"


def any_but(characters: str) -> str:
    """Return the class of GBNF for all characters of texts but these. llama.cpp lets `[^…]` match invalid UTF-8."""
    return character_class(without(list(_IN_TEXTS), [(ord(one), ord(one)) for one in characters]))


def _range(low: int, high: int) -> str:
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"


def _code(code: int) -> str:
    character = chr(code)
    if code < 0x80 and (character.isalnum() or character in " _"):
        return character
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _fork(parts: Iterable[tuple[str, str]]) -> str:
    """Return alternatives that begin differently, each a text and the rule after it. First characters before the same
    text and rule are one class.
    """
    firsts: dict[tuple[str, str], list[str]] = {}
    alternatives: list[str] = []
    for text, rest in parts:
        if text:
            firsts.setdefault((text[1:], rest), []).append(text[0])
        else:
            alternatives.append(literal(""))
    for (text, rest), first in firsts.items():
        if len(first) == 1:
            words = [literal(first[0] + text), rest]
        else:
            some = character_class(merged((ord(one), ord(one)) for one in first))
            words = [some, literal(text) if text else "", rest]
        alternatives.append(" ".join(filter(None, words)))
    if len(alternatives) > MAX_WAYS:
        raise ValueError(f"more than {MAX_WAYS:,} values go on differently after the same beginning")
    return " | ".join(alternatives)


def _n_shared(one: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Rules:
    """The rules of one grammar. Equal rules are kept once."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._by_body: dict[str, str] = {}
        self._last: dict[str, int] = {}  # number of a reserved name
        self.n_visited = 0  # parts of schemas

    def reserve(self, name: str) -> str:
        """Return an unused name like `name`, for a rule that will be defined later."""
        name = re.sub("[^a-zA-Z0-9]+", "-", name).strip("-").lower()[:40] or "value"
        chosen, n = name, self._last.get(name, 1)
        while chosen in self._bodies or chosen in _BUILT_IN:
            n += 1
            chosen = f"{name}-{n}"
        self._last[name] = n
        self._bodies[chosen] = ""
        return chosen

    def define(self, name: str, body: str) -> None:
        self._bodies[name] = body

    def add(self, name: str, body: str) -> str:
        """Return the name of a rule with this body."""
        known = self._by_body.get(body)
        if known is None:
            known = self._by_body[body] = self.reserve(name)
            self._bodies[known] = body
        return known

    def built_in(self, name: str) -> str:
        """Include a rule of JSON, and what it refers to; returns `name`."""
        if name not in self._bodies:
            self._bodies[name] = body = _BUILT_IN[name]
            for word in _WORD.findall(_QUOTED.sub(" ", body)):
                self.built_in(word)
        return name

    def repeat(self, rule: str, minimum: int, maximum: int | None) -> str:
        """Return an expression for `minimum` to `maximum` (None: no limit) times the rule with this name.

        Raises:
            ValueError: too many.
        """
        if minimum > MAX_REPETITIONS:
            raise ValueError(f"at least {minimum:,} repetitions are too many, the limit is {MAX_REPETITIONS:,}")
        if maximum is None:
            body = f"{rule}{{{minimum},}}" if minimum > 1 else f"{rule}{'+' if minimum else '*'}"
        elif maximum <= MAX_REPETITIONS:
            body = f"{rule}{{{minimum},{maximum}}}"
        else:
            body = (f"{rule}{{{minimum}}} " if minimum else "") + self._up_to(rule, min(maximum, _LONGEST) - minimum)
        # A group that repeats counts the rules that llama.cpp makes of what is in it.
        return self.add(f"{rule}-many", body) if max(minimum, maximum or 0) > _MANY else body

    def _up_to(self, rule: str, maximum: int) -> str:
        if maximum <= MAX_REPETITIONS:
            return f"{rule}{{0,{maximum}}}"
        more = self._up_to(rule, maximum - MAX_REPETITIONS)
        return self.add(f"{rule}-more", f"{rule}{{0,{MAX_REPETITIONS - 1}}} | {rule}{{{MAX_REPETITIONS}}} {more}")

    def choice(self, texts: Iterable[str], name: str) -> str:
        """Return an expression for one of some texts, as a prefix tree: llama.cpp follows each alternative until the
        text tells them apart. Texts that end alike share the rules of their ends.

        Raises:
            ValueError: too many texts go on differently in one place.
        """
        ordered = sorted(set(texts))
        forks: list[tuple[int, list[tuple[str, str]]]] = [(0, [])]  # where texts part; what follows, and the rule then
        for text, following in zip(ordered, [*ordered[1:], ""], strict=True):
            shared, end, rest = _n_shared(text, following), len(text), ""
            while forks[-1][0] > shared:
                start, parts = forks.pop()
                rest, end = self.add(name, _fork([*parts, (text[start:end], rest)])), start
            if forks[-1][0] < shared:
                forks.append((shared, []))
            forks[-1][1].append((text[shared:end], rest))
        return _fork(forks[0][1])

    def text(self) -> str:
        """Return the grammar, the root first; a rule that was reserved but not defined is empty."""
        names = sorted(self._bodies, key=lambda name: name != ROOT)
        return "".join(f"{name} ::= {self._bodies[name] or literal('')}\n" for name in names)


_DIGITS: Final = 16  # more would not survive a reader that uses doubles
_TOP: Final = 10**_DIGITS
_FRACTION: Final = '("." [0-9]{1,16})?'


@dataclass(frozen=True)
class NumberBounds:
    """The bounds of a number; None: none. An open one is not part of it."""

    low: int | None = None
    high: int | None = None
    low_open: bool = False
    high_open: bool = False


def numbers(bounds: NumberBounds, *, whole: bool) -> str:
    """Return an expression for the numbers within `bounds`; with fractions unless `whole`, never with an exponent.

    Raises:
        ValueError: there are none.
    """
    low, high = bounds.low, bounds.high
    parts: list[str] = []
    if high is None or high >= 0:
        minimum, is_open = (low, bounds.low_open) if low is not None and low >= 0 else (0, False)
        parts += _magnitudes(minimum, high, is_open, bounds.high_open, whole)
    if low is None or low < 0:
        # Zero has no sign, so magnitudes begin above it.
        minimum, is_open = (-high, bounds.high_open) if high is not None and high < 0 else (0, True)
        negative = _magnitudes(minimum, None if low is None else -low, is_open, bounds.low_open, whole)
        parts += [f'"-" ({" | ".join(negative)})'] if negative else []
    if not parts:
        raise ValueError("there is no number within these bounds")
    return " | ".join(parts)


def _magnitudes(minimum: int, maximum: int | None, minimum_open: bool, maximum_open: bool, whole: bool) -> list[str]:
    """Return alternatives for the numbers from `minimum` >= 0 to `maximum`."""
    if maximum is None or maximum >= _TOP:
        maximum, maximum_open = _TOP, True
    if whole:
        return _integers(minimum + minimum_open, maximum - maximum_open)
    parts = [
        f"({' | '.join(found)}) {_FRACTION}" for found in (_integers(minimum + minimum_open, maximum - 1),) if found
    ]
    if minimum_open and minimum < maximum:
        parts.append(f'"{minimum}." [0-9]{{0,15}} [1-9]')
    if not maximum_open and (maximum > minimum or (maximum == minimum and not minimum_open)):
        parts.append(f'"{maximum}" ("." "0"{{1,16}})?')
    return parts


def _integers(low: int, high: int) -> list[str]:
    """Return alternatives for the integers from `low` to `high`, both at least 0."""
    if low > high:
        return []
    parts: list[str] = []
    if low == 0:
        if high < 10:
            return [_between("0", str(high))]
        parts.append('"0"')
        low = 1
    full: tuple[int, int] | None = None  # lengths of which all numbers belong to it
    for length in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (length - 1)), min(high, 10**length - 1)
        if (first, last) == (10 ** (length - 1), 10**length - 1):
            full = (full[0] if full else length, length)
        else:
            parts.append(_between(str(first), str(last)))
    if full:
        parts.append(f"[1-9] [0-9]{{{full[0] - 1},{full[1] - 1}}}" if full[1] > 1 else "[1-9]")
    return parts


def _between(low: str, high: str) -> str:
    """Return an expression for the numbers from `low` to `high`, which have the same number of digits."""
    same = 0
    while same < len(low) and low[same] == high[same]:
        same += 1
    if same == len(low):
        return f'"{low}"'
    prefix, low, high = low[:same], low[same:], high[same:]
    rest = len(low) - 1
    digits = f" [0-9]{{{rest}}}" if rest else ""
    start, end = int(low[0]), int(high[0])
    parts: list[str] = []
    if low[1:] != "0" * rest:
        parts.append(f'"{start}" ({_between(low[1:], "9" * rest)})')
        start += 1
    top = ""
    if high[1:] != "9" * rest:
        top = f'"{end}" ({_between("0" * rest, high[1:])})'
        end -= 1
    if start <= end:
        parts.append(f"[{start}-{end}]{digits}")
    if top:
        parts.append(top)
    body = " | ".join(parts)
    return f'"{prefix}" ({body})' if prefix else body


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
                minimum, maximum, inner = value
                rule = self._rules.add(f"{self._name}-part", self.sequence(inner, depth))
                return self._rules.repeat(rule, minimum, None if maximum == _parser.MAXREPEAT else maximum)
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
    if len(plain) > MAX_RANGES:
        raise ValueError(f"has a class of more than {MAX_RANGES:,} ranges")
    if plain:
        parts.append(character_class(plain))
    escaped = "".join(text for code, text in _ESCAPES.items() if any(low <= code <= high for low, high in ranges))
    if escaped:
        parts.append(f'"\\\\" [{escaped}]')
    if not parts:
        raise ValueError("asks for a character that JSON strings do not have")
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"
