"""Checks a grammar in GBNF, llama.cpp's notation, and says in which line it is wrong.

llama.cpp checks a grammar only once a model is loaded, and its messages name no line. The syntax is that of its parser
(src/llama-grammar.cpp) without token elements (`<think>`, `<[7]>`): control tokens have no text that an answer could
hold.
"""

from __future__ import annotations

import re
from typing import Final, NoReturn

from cpuchat.base.errors import AmbiguousGrammar, UsageError
from cpuchat.grammar.characters import LAST, MOST_RANGES, Ranges, merged
from cpuchat.grammar.ways import Body, Element, check_ways, left_recursive

ROOT: Final = "root"
MAX_REPETITIONS: Final = 2000
"""llama.cpp's limit; a higher maximum would count as no limit."""
LONGEST_FORM: Final = 1 << 20
"""Bytes of a grammar or a JSON schema that are accepted."""
_MAX_DEPTH: Final = 100
_MOST_ELEMENTS: Final = 100_000

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_OR_NEWLINE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_ESCAPE = re.compile(r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\"\[\]-])')
_PLAIN = re.compile(r'[^"\\]+')
_BOUNDS = re.compile(r"\{[ \t]*+([0-9]++)[ \t]*+(?:(,)[ \t]*+([0-9]*+)[ \t]*+)?\}")


def check_grammar(text: str, source: str) -> None:
    """Check the grammar `text`, read from `source`.

    Raises:
        UsageError: names `source`, the line and the reason.
        AmbiguousGrammar: llama.cpp would need too long to follow it.
    """
    bodies = _Parser(text, source).check()
    try:
        check_ways(bodies)
    except AmbiguousGrammar as error:
        raise AmbiguousGrammar(f"{source}: {error.message}.", error.hint) from None


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._at = 0
        self._rules: dict[str, Body] = {ROOT: Body(ROOT)}
        self._groups: list[Body] = []
        self._places: dict[str, int] = {}  # of definitions, then of references
        self._references: dict[str, int] = {}
        self._name_of_rule = ""
        self._n_elements = 0

    def check(self) -> list[Body]:
        """Return the bodies of the rules, the root first, then those of groups. Raises UsageError."""
        if (zero := self._text.find("\0")) >= 0:
            self._fail("a zero byte", zero)
        self._skip(_SPACE_OR_NEWLINE)
        while self._at < len(self._text):
            self._rule()
        if ROOT not in self._places:
            raise UsageError(f"{self._source}: there is no rule named root.", "The answer begins with that rule.")
        for name, place in self._references.items():
            if name not in self._places:
                self._fail(f"there is no rule named {name}", place)
        bodies = [*self._rules.values(), *self._groups]
        if (body := left_recursive(bodies)) is not None:
            self._fail(f"the rule {body.name} is left-recursive: it begins with itself", self._places[body.name])
        return bodies

    def _fail(self, reason: str, place: int | None = None, kind: type[UsageError] = UsageError) -> NoReturn:
        line = self._text.count("\n", 0, self._at if place is None else place) + 1
        raise kind(f"{self._source}, line {line}: {reason}.", "See the GBNF guide of llama.cpp (grammars/README.md).")

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

    def _rule(self) -> None:
        place = self._at
        name = self._name()
        self._skip(_SPACE)
        if self._peek(3) != "::=":
            self._fail(f"expected ::= after {name} (names consist of letters, digits and -)")
        self._at += 3
        self._skip(_SPACE_OR_NEWLINE)
        self._places[name] = place
        self._name_of_rule = name
        self._body(name).alternates = self._alternates(0)
        if self._at < len(self._text) and self._peek() not in "\r\n":
            self._fail(f"unexpected {self._peek()!r}")
        self._skip(_SPACE_OR_NEWLINE)

    def _body(self, name: str) -> Body:
        return self._rules.setdefault(name, Body(name))

    def _group(self, alternates: list[list[Element]]) -> Element:
        self._groups.append(Body(self._name_of_rule, alternates))
        return Element(body=self._groups[-1])

    def _alternates(self, depth: int) -> list[list[Element]]:
        if depth > _MAX_DEPTH:
            self._fail("parentheses are nested too deeply")
        alternates = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            self._skip(_SPACE_OR_NEWLINE)
            alternates.append(self._sequence(depth))
        return alternates

    def _sequence(self, depth: int) -> list[Element]:
        elements: list[Element] = []
        space = _SPACE_OR_NEWLINE if depth else _SPACE
        while character := self._peek():
            if character in "*+?{":
                if not elements:
                    self._fail(f"nothing before {character} to repeat")
                if elements[-1].text or (elements[-1].least, elements[-1].most) != (1, 1):
                    one = elements[-1]
                    elements[-1] = self._group([[one]])
                    elements[-1].n_copied = len(one.text)
                elements[-1].least, elements[-1].most = self._repetition()
            elif (element := self._element(character, depth)) is not None:
                elements.append(element)
            else:
                break
            self._skip(space)
        return elements

    def _element(self, character: str, depth: int) -> Element | None:
        """Parse one element; None if there is none."""
        place = self._at
        self._n_elements += 1
        if self._n_elements > _MOST_ELEMENTS:
            self._fail(f"more than {_MOST_ELEMENTS:,} elements: write less", kind=AmbiguousGrammar)
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
            return self._group(group)
        if character == ".":
            self._at += 1
            return Element(ranges=[(0, LAST)])
        if character in "<!":
            self._fail("elements that name a token are not supported")
        if _NAME.match(character):
            name = self._name()
            self._references.setdefault(name, place)
            return Element(body=self._body(name))
        return None

    def _literal(self) -> Element:
        place, parts = self._at, list[str]()
        self._at += 1
        while (character := self._peek()) != '"':
            if not character:
                self._fail("a text in quotes is not closed", place)
            if (found := _PLAIN.match(self._text, self._at)) is not None:
                parts.append(found[0])
                self._at = found.end()
            else:
                parts.append(chr(min(self._code(), LAST)))
        self._at += 1
        text = "".join(parts)
        return Element(text=text) if len(text) > 1 else Element(ranges=[(ord(one), ord(one)) for one in text])

    def _class(self) -> Element:
        place, ranges = self._at, Ranges()
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
        if len(ranges) > MOST_RANGES:
            reason = f"a class has more than {MOST_RANGES:,} characters and ranges: write ranges"
            self._fail(reason, place, AmbiguousGrammar)
        return Element(ranges=merged(ranges), negated=negated)

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

    def _repetition(self) -> tuple[int, int | None]:
        """Skip a repetition; returns how often at least and at most."""
        character = self._peek()
        if character != "{":
            self._at += 1
            return (int(character == "+"), None) if character != "?" else (0, 1)
        found = _BOUNDS.match(self._text, self._at)
        if found is None:
            self._fail("expected {n}, {n,} or {n,m}")
        least, most = (int(digits.lstrip("0")[:9] or 0) if digits else None for digits in (found[1], found[3]))
        assert least is not None
        end = None if found[2] and most is None else least if most is None else most
        if max(least, end or 0) > MAX_REPETITIONS:
            self._fail(f"more than {MAX_REPETITIONS} repetitions")
        if end is not None and end < least:
            self._fail(f"{found[0]} ends before it begins")
        self._at = found.end()
        return least, end
