"""The rules of a grammar under construction, and those that every JSON text uses.

White space is free to a point: a model that may write it endlessly sometimes does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from cpuchat.grammar.gbnf import MAX_REPETITIONS, ROOT

_LONGEST: Final = 10_000
"""The longest string or array with a limit; a higher limit counts as this one."""

_MANY: Final = 20
SPACE: Final = "space"
_HEX = "[0-9a-fA-F]"
# Line separators are not for every reader, surrogates could stand alone.
NOT_IN_STRINGS: Final = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F), (0x2028, 0x2029), (0xD800, 0xDFFF))
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

    def repeat(self, rule: str, least: int, most: int | None) -> str:
        """Return an expression for `least` to `most` (None: no limit) times the rule with this name.

        Raises:
            ValueError: too many.
        """
        if least > MAX_REPETITIONS:
            raise ValueError(f"at least {least:,} repetitions are too many, the limit is {MAX_REPETITIONS:,}")
        if most is None:
            body = f"{rule}{{{least},}}" if least > 1 else f"{rule}{'+' if least else '*'}"
        elif most <= MAX_REPETITIONS:
            body = f"{rule}{{{least},{most}}}"
        else:
            body = (f"{rule}{{{least}}} " if least else "") + self._up_to(rule, min(most, _LONGEST) - least)
        # A group that repeats counts the rules that llama.cpp makes of what is in it.
        return self.add(f"{rule}-many", body) if max(least, most or 0) > _MANY else body

    def _up_to(self, rule: str, most: int) -> str:
        if most <= MAX_REPETITIONS:
            return f"{rule}{{0,{most}}}"
        more = self._up_to(rule, most - MAX_REPETITIONS)
        return self.add(f"{rule}-more", f"{rule}{{0,{MAX_REPETITIONS - 1}}} | {rule}{{{MAX_REPETITIONS}}} {more}")

    def choice(self, texts: Iterable[str], name: str) -> str:
        """Return an expression for one of some texts. A prefix that several share is written once: llama.cpp follows
        each alternative until the text tells them apart.
        """
        ordered = sorted(set(texts))
        forks: list[tuple[int, list[str]]] = [(0, [])]  # where texts part, and the expressions of what follows there
        for text, following in zip(ordered, [*ordered[1:], ""], strict=True):
            shared, end, rest = _n_shared(text, following), len(text), ""
            while forks[-1][0] > shared:
                start, parts = forks.pop()
                rest = self.add(name, " | ".join([*parts, f"{literal(text[start:end])} {rest}".rstrip()]))
                end = start
            if forks[-1][0] < shared:
                forks.append((shared, []))
            forks[-1][1].append(f"{literal(text[shared:end])} {rest}".rstrip())
        return " | ".join(forks[0][1])

    def text(self) -> str:
        """Return the grammar, the root first; a rule that was reserved but not defined is empty."""
        names = sorted(self._bodies, key=lambda name: name != ROOT)
        return "".join(f"{name} ::= {self._bodies[name] or literal('')}\n" for name in names)
