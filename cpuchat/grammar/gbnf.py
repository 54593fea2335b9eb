"""Turns GBNF, llama.cpp's notation of grammars, into Lark as llguidance takes it.

The syntax is that of llama.cpp's parser (src/llama-grammar.cpp) without elements that name a token (`<think>`,
`<[7]>`): control tokens have no text that an answer could hold.

Without recursion all rules together are one terminal, a regular expression. Otherwise each character is a terminal of
its own: longer ones would be matched greedily, and a text that can be read in several ways be refused.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Final, NoReturn

from cpuchat.base.errors import UsageError
from cpuchat.grammar.limits import MAX_LEVELS, check_lark

_ROOT: Final = "root"
_MAX_REPETITIONS: Final = 2000  # as in llama.cpp
_MAX_ELEMENTS: Final = 20_000
_MAX_RANGES: Final = 4096  # of one class
_MAX_SEQUENCE: Final = 1_000_000  # elements of the longest sequence, with those of the rules in it, which are one list
_LAST: Final = 0x10FFFF
_ANY: Final = r"/[\x{0}-\x{10FFFF}]/"
_SPACE: Final = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_OR_NEWLINE: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME: Final = re.compile(r"[a-zA-Z0-9-]+")
_ESCAPE: Final = re.compile(r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\"\[\]-])')
_LARK_NAME: Final = re.compile(r"[rg](?=\d)")
_BOUNDS: Final = re.compile(r"\{[ \t]*+([0-9]++)[ \t]*+(?:(,)[ \t]*+([0-9]*+)[ \t]*+)?\}")


def check_grammar(text: str, source: str) -> None:
    """Check the GBNF `text`, read from `source`. Raises UsageError, as `gbnf_to_lark`."""
    check_lark(gbnf_to_lark(text, source), source)


def gbnf_to_lark(text: str, source: str) -> str:
    """Return the same grammar in Lark. Raises UsageError: names `source`, the line and the reason."""
    return _Parser(text, source).parse()


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._at = 0
        self._rules: dict[str, str] = {}
        self._groups: list[str] = []
        self._name_of_rule = ""
        self._inner: dict[str, list[tuple[str, int]]] = {}  # rules in each rule, and how deep in parentheses
        self._references: dict[str, int] = {}  # where each rule is first referred to
        self._numbers: dict[str, int] = {}
        self._n_elements = 0

    def parse(self) -> str:
        if (zero := self._text.find("\0")) >= 0:
            self._fail("a zero byte", zero)
        self._skip(_SPACE_OR_NEWLINE)
        while self._at < len(self._text):
            name = self._name()
            self._skip(_SPACE)
            if self._peek(3) != "::=":
                self._fail(f"expected ::= after {name} (names consist of letters, digits and -)")
            self._at += 3
            self._skip(_SPACE_OR_NEWLINE)
            self._name_of_rule, self._inner[name] = name, []
            self._rules[name] = self._alternates(0)
            if self._at < len(self._text) and self._peek() not in "\r\n":
                self._fail(f"unexpected {self._peek()!r}")
            self._skip(_SPACE_OR_NEWLINE)
        if _ROOT not in self._rules:
            raise UsageError(f"{self._source}: there is no rule named root.", "The answer begins with that rule.")
        for name, place in self._references.items():
            if name not in self._rules:
                self._fail(f"there is no rule named {name}", place)
        n_levels, is_recursive = self._chain()
        if n_levels > MAX_LEVELS:
            raise UsageError(f"{self._source}: rules refer to each other over more than {MAX_LEVELS} levels.")
        rules = [f"{self._lark_name(name)}: {body}\n" for name, body in self._rules.items()]
        groups = [f"g{n}: {body}\n" for n, body in enumerate(self._groups, 1)]
        if not is_recursive and self._longest() > _MAX_SEQUENCE:
            raise UsageError(f"{self._source}: rules in rules make a sequence of more than {_MAX_SEQUENCE:,} elements.")
        text = "".join([f"start: {self._lark_name(_ROOT)}\n", *rules, *groups])
        return text if is_recursive else _LARK_NAME.sub(lambda name: name[0].upper(), text)

    def _chain(self) -> tuple[int, bool]:
        """Return the levels of the longest chain of rules, each in the one before, at most some more than `MAX_LEVELS`;
        and whether a rule is in itself."""
        levels: dict[str, int] = {}
        open_rules = set[str]()
        is_recursive = False

        def measure(name: str, above: int) -> int:
            nonlocal is_recursive
            is_recursive |= name in open_rules
            if name not in levels:
                levels[name] = 0 if above <= MAX_LEVELS else MAX_LEVELS + 1
                open_rules.add(name)
                inner = self._inner[name] if above <= MAX_LEVELS else []
                levels[name] = max([levels[name], *(n + measure(other, above + n) for other, n in inner)])
                open_rules.discard(name)
            return levels[name]

        return max(measure(name, 0) for name in self._inner), is_recursive

    def _longest(self) -> int:
        """Return the elements of the longest sequence, with those of rules that are not recursive in their places."""
        bodies = {self._lark_name(name): body for name, body in self._rules.items()}
        bodies |= {f"g{n}": body for n, body in enumerate(self._groups, 1)}

        @cache
        def length(name: str) -> int:
            alternates = bodies[name].split(" | ") if name in bodies else []
            return max((sum(map(length, one.split(" "))) for one in alternates), default=1)

        return max(map(length, bodies))

    def _lark_name(self, name: str) -> str:
        return f"r{self._numbers.setdefault(name, len(self._numbers))}"

    def _fail(self, reason: str, place: int | None = None) -> NoReturn:
        line = self._text.count("\n", 0, self._at if place is None else place) + 1
        hint = "See the GBNF guide of llama.cpp (grammars/README.md)."
        raise UsageError(f"{self._source}, line {line}: {reason}.", hint)

    def _peek(self, length: int = 1) -> str:
        return self._text[self._at : self._at + length]

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            self._fail(f"expected the name of a rule, found {self._peek() or 'the end'!r}")
        self._at = found.end()
        return found[0]

    def _alternates(self, depth: int) -> str:
        if depth > MAX_LEVELS:
            self._fail("parentheses are nested too deeply")
        alternates = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            self._skip(_SPACE_OR_NEWLINE)
            alternates.append(self._sequence(depth))
        return " | ".join(alternates)

    def _sequence(self, depth: int) -> str:
        elements: list[str] = []
        space = _SPACE_OR_NEWLINE if depth else _SPACE
        while character := self._peek():
            if character in "*+?{":
                if not elements:
                    self._fail(f"nothing before {character} to repeat")
                one, times = elements[-1], self._repetition()
                one = f"({one})" if one[-1] in "*+?}" else one
                elements[-1] = {"{0,0}": '""', "{1,1}": elements[-1]}.get(times, f"{one}{times}")
            elif element := self._element(character, depth):
                elements.append(element)
            else:
                break
            self._skip(space)
        return " ".join(elements) or '""'

    def _element(self, character: str, depth: int) -> str:
        place = self._at
        self._n_elements += 1
        if self._n_elements > _MAX_ELEMENTS:
            self._fail(f"more than {_MAX_ELEMENTS:,} elements")
        if character == '"':
            return self._literal()
        if character == "[":
            return self._class()
        if character == "(":
            self._at += 1
            self._skip(_SPACE_OR_NEWLINE)
            group = self._alternates(depth + 1)
            if self._peek() != ")":
                self._fail("expected )")
            self._at += 1
            self._groups.append(group)
            return f"g{len(self._groups)}"
        if character == ".":
            self._at += 1
            return _ANY
        if character in "<!":
            self._fail("elements that name a token are not supported")
        if _NAME.match(character):
            name = self._name()
            self._references.setdefault(name, place)
            self._inner[self._name_of_rule].append((name, depth + 1))
            return self._lark_name(name)
        return ""

    def _literal(self) -> str:
        place, characters = self._at, list[str]()
        self._at += 1
        while (character := self._peek()) != '"':
            if not character:
                self._fail("a text in quotes is not closed", place)
            characters.append(json.dumps(chr(min(self._code(), _LAST)), ensure_ascii=False))
        self._at += 1
        self._n_elements += len(characters)
        return f"({' '.join(characters)})" if len(characters) > 1 else "".join(characters) or '""'

    def _class(self) -> str:
        place, ranges = self._at, list[tuple[int, int]]()
        negated = self._peek(2) == "[^"
        self._at += 1 + negated
        while (character := self._peek()) != "]":
            if not character:
                self._fail("a class of characters is not closed", place)
            begin = self._at
            low = high = self._code()
            if self._peek() == "-" and self._peek(2) != "-]":
                self._at += 1
                high = self._code() if self._peek() else low
                if high < low:
                    self._fail(f"the range {self._text[begin : self._at]} ends before it begins", place)
            ranges.append((low, high))
        self._at += 1
        if not ranges:
            self._fail("an empty class of characters", place)
        if len(ranges) > _MAX_RANGES:
            self._fail(f"a class has more than {_MAX_RANGES:,} characters and ranges", place)
        if not (known := [(low, min(high, _LAST)) for low, high in ranges if low <= _LAST]) and not negated:
            self._fail("a class without a character of Unicode", place)
        parts = (f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in known)
        return f"/[{'^' if negated else ''}{''.join(parts)}]/" if known else _ANY

    def _code(self) -> int:
        """Return the code point of the next character, which may be escaped."""
        if self._peek() != "\\":
            self._at += 1
            return ord(self._text[self._at - 1])
        found = _ESCAPE.match(self._text, self._at)
        if found is None:
            self._fail(f"unknown escape {self._peek(2)}")
        self._at = found.end()
        letter, digits = found[0][1], found[0][2:]
        return int(digits, 16) if digits else ord({"t": "\t", "r": "\r", "n": "\n"}.get(letter, letter))

    def _repetition(self) -> str:
        character = self._peek()
        if character != "{":
            self._at += 1
            return character
        found = _BOUNDS.match(self._text, self._at)
        if found is None:
            self._fail("expected {n}, {n,} or {n,m}")
        low = int(found[1].lstrip("0")[:9] or 0)
        high = int(found[3].lstrip("0")[:9] or 0) if found[3] else None if found[2] else low
        if max(low, high or 0) > _MAX_REPETITIONS:
            self._fail(f"more than {_MAX_REPETITIONS} repetitions")
        if high is not None and high < low:
            self._fail(f"{found[0]} ends before it begins")
        self._at = found.end()
        return f"{{{low},{'' if high is None else high}}}"
