"""Checks a grammar in GBNF, llama.cpp's notation, and says in which line it is wrong.

llama.cpp checks a grammar only once a model is loaded, and its messages name no line. The syntax is that of its parser
(src/llama-grammar.cpp) without token elements (`<think>`, `<[7]>`): control tokens have no text that an answer could
hold.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NoReturn

from cpuchat.errors import UsageError

ROOT: Final = "root"
MAX_REPETITIONS: Final = 2000
"""llama.cpp's limit; a higher maximum would count as no limit."""
LONGEST_FORM: Final = 1 << 20
"""Bytes of a grammar or a JSON schema that are accepted."""
_MAX_DEPTH: Final = 100

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_OR_NEWLINE = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_ESCAPE = re.compile(r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\"\[\]-])')
_BOUNDS = re.compile(r"\{[ \t]*+([0-9]++)[ \t]*+(?:(,)[ \t]*+([0-9]*+)[ \t]*+)?\}")


@dataclass
class _Element:
    """One element of a sequence: characters, a reference to a rule, or a group."""

    rule: str = ""
    group: list[list[_Element]] = field(default_factory=list)
    may_be_empty: bool = False


_Alternates = list[list[_Element]]


def check_grammar(text: str, source: str) -> None:
    """Check the grammar `text`, read from `source`.

    Raises:
        UsageError: names `source`, the line and the reason.
    """
    _Parser(text, source).check()


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._at = 0
        self._rules: dict[str, _Alternates] = {}
        self._places: dict[str, int] = {}  # of definitions, then of references
        self._references: dict[str, int] = {}

    def check(self) -> None:
        if (zero := self._text.find("\0")) >= 0:
            self._fail("a zero byte", zero)
        self._skip(_SPACE_OR_NEWLINE)
        while self._at < len(self._text):
            self._rule()
        if ROOT not in self._rules:
            raise UsageError(f"{self._source}: there is no rule named root.", "The answer begins with that rule.")
        for name, place in self._references.items():
            if name not in self._rules:
                self._fail(f"there is no rule named {name}", place)
        if (name := _left_recursive(self._rules)) is not None:
            self._fail(f"the rule {name} is left-recursive: it begins with itself", self._places[name])

    def _fail(self, reason: str, place: int | None = None) -> NoReturn:
        line = self._text.count("\n", 0, self._at if place is None else place) + 1
        raise UsageError(
            f"{self._source}, line {line}: {reason}.", "See the GBNF guide of llama.cpp (grammars/README.md)."
        )

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
        self._rules[name] = self._alternates(0)
        if self._at < len(self._text) and self._peek() not in "\r\n":
            self._fail(f"unexpected {self._peek()!r}")
        self._skip(_SPACE_OR_NEWLINE)

    def _alternates(self, depth: int) -> _Alternates:
        if depth > _MAX_DEPTH:
            self._fail("parentheses are nested too deeply")
        alternates = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            self._skip(_SPACE_OR_NEWLINE)
            alternates.append(self._sequence(depth))
        return alternates

    def _sequence(self, depth: int) -> list[_Element]:
        elements: list[_Element] = []
        space = _SPACE_OR_NEWLINE if depth else _SPACE
        while character := self._peek():
            if character in "*+?{":
                if not elements:
                    self._fail(f"nothing before {character} to repeat")
                if self._repetition():
                    elements[-1] = _Element(group=[[elements[-1]]], may_be_empty=True)
            elif (element := self._element(character, depth)) is not None:
                elements.append(element)
            else:
                break
            self._skip(space)
        return elements

    def _element(self, character: str, depth: int) -> _Element | None:
        """Parse one element; None if there is none."""
        place = self._at
        if character == '"':
            return _Element(may_be_empty=len(self._characters('"', "a text in quotes")) == 0)
        if character == "[":
            self._at += self._peek(2) == "[^"
            self._check_class(self._characters("]", "a class of characters"), place)
            return _Element()
        if character == "(":
            self._at += 1
            self._skip(_SPACE_OR_NEWLINE)
            group = self._alternates(depth + 1)
            if self._peek() != ")":
                self._fail("expected )")
            self._at += 1
            return _Element(group=group)
        if character == ".":
            self._at += 1
            return _Element()
        if character in "<!":
            self._fail("elements that name a token are not supported")
        if _NAME.match(character):
            name = self._name()
            self._references.setdefault(name, place)
            return _Element(rule=name)
        return None

    def _check_class(self, characters: list[str], place: int) -> None:
        """Check a class that begins at `place`: llama.cpp takes an empty one, and one from which nothing is left."""
        if not characters:
            self._fail("an empty class of characters", place)
        at = 0
        while at < len(characters) - 2:
            low, dash, high = characters[at : at + 3]
            if dash == "-" and _code(high) < _code(low):
                self._fail(f"the range {low}-{high} ends before it begins", place)
            at += 3 if dash == "-" else 1

    def _characters(self, end: str, what: str) -> list[str]:
        """Skip a text or a class up to and including `end`; returns its characters, escapes as they are written."""
        place, characters = self._at, list[str]()
        self._at += 1
        while (character := self._peek()) != end:
            if not character:
                self._fail(f"{what} is not closed", place)
            if character == "\\":
                found = _ESCAPE.match(self._text, self._at)
                if found is None:
                    self._fail(f"unknown escape {self._peek(2)}")
                character = found[0]
            self._at += len(character)
            characters.append(character)
        self._at += 1
        return characters

    def _repetition(self) -> bool:
        """Skip a repetition; returns whether it may be zero times."""
        character = self._peek()
        if character != "{":
            self._at += 1
            return character != "+"
        found = _BOUNDS.match(self._text, self._at)
        if found is None:
            self._fail("expected {n}, {n,} or {n,m}")
        # Python refuses to read thousands of digits.
        least, most = (int(found[n].lstrip("0")[:9] or 0) for n in (1, 3 if found[3] else 1))
        if max(least, most) > MAX_REPETITIONS:
            self._fail(f"more than {MAX_REPETITIONS} repetitions")
        if most < least:
            self._fail(f"{found[0]} ends before it begins")
        self._at = found.end()
        return least == 0


def _code(character: str) -> int:
    """Return the code point of a character that may be written as an escape."""
    if character[1:2] in ("x", "u", "U"):
        return int(character[2:], 16)
    return ord({"\\t": "\t", "\\r": "\r", "\\n": "\n"}.get(character, character[-1]))


def _left_recursive(rules: dict[str, _Alternates]) -> str | None:
    """Return a rule that can reach itself without a character in between, if there is one."""
    empty: set[str] = set()

    def is_empty(element: _Element) -> bool:
        if element.may_be_empty or element.rule in empty:
            return True
        return any(all(map(is_empty, alternate)) for alternate in element.group)

    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, body in rules.items():
        for rule in _named(body):
            users[rule].add(name)
    unsettled = list(rules)
    while unsettled:
        name = unsettled.pop()
        if name not in empty and any(all(map(is_empty, alternate)) for alternate in rules[name]):
            empty.add(name)
            unsettled += users[name]

    def firsts(body: _Alternates) -> set[str]:
        found: set[str] = set()
        for alternate in body:
            for element in alternate:
                found |= {element.rule} if element.rule else firsts(element.group)
                if not is_empty(element):
                    break
        return found

    return _in_cycle({name: firsts(body) for name, body in rules.items()})


def _named(body: _Alternates) -> set[str]:
    """Return the rules that a body names."""
    found: set[str] = set()
    for alternate in body:
        for element in alternate:
            found |= {element.rule} if element.rule else _named(element.group)
    return found


def _in_cycle(edges: dict[str, set[str]]) -> str | None:
    """Return a node from which a path leads back to it, None if there is none."""
    above, done = set[str](), set[str]()
    for start in edges:
        path = [(start, iter(edges[start]))] if start not in done else []
        above.update(name for name, _ in path)
        while path:
            name, others = path[-1]
            other = next(others, None)
            if other is None:
                path.pop()
                above.discard(name)
                done.add(name)
            elif other in above:
                return other
            elif other not in done:
                above.add(other)
                path.append((other, iter(edges[other])))
    return None
