"""Checks a grammar in GBNF, llama.cpp's notation: its syntax, and what llama.cpp has to do to follow it.

llama.cpp checks a grammar only once a model is loaded, and its messages name no line. The syntax is that of its parser
(src/llama-grammar.cpp) without token elements (`<think>`, `<[7]>`): control tokens have no text that an answer could
hold.

llama.cpp keeps a stack for every way to read the text, expands each repetition into a rule per round, and searches for
left recursion without remembering where it has been: a grammar of 40 bytes can take minutes and gigabytes. All of that
is counted here, never timed: the limits are the same on every machine.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NoReturn

from cpuchat.base.errors import AmbiguousGrammar, UsageError

Ranges = list[tuple[int, int]]

ROOT: Final = "root"
MAX_REPETITIONS: Final = 2000
"""llama.cpp's limit; a higher maximum would count as no limit."""
LONGEST_FORM: Final = 1 << 20
"""Bytes of a grammar or a JSON schema that are accepted."""
_MAX_DEPTH: Final = 100
_MAX_ELEMENTS: Final = 100_000
LAST: Final = 0x10FFFF
MAX_RANGES: Final = 4096
"""Ranges of a class: llama.cpp tries them one by one, for each token of the vocabulary."""
MAX_WAYS: Final = 4096
"""Ways to read a text that llama.cpp may have to follow at once."""
_MAX_PATHS: Final = 1 << 22
"""Ways to reach them within `STEPS` characters: llama.cpp's check of a token does not merge those that meet."""
STEPS: Final = 16
"""Characters of a text that are tried; longer tokens are not used under a grammar."""
_MAX_EXPANDED: Final = 2_000_000  # elements of the expanded rules, some 30 bytes each
_RULE_SIZE: Final = 8  # elements that a rule takes as much memory as
_MAX_SEARCHED: Final = 20_000_000  # rules that the search for left recursion enters
_RULE_WORK, _WORK = 100_000, 150_000  # stacks looked at, from one rule on and from all
_PROBES: Final = (0x61, 0x20, 0x30, 0x41, 0x2D, 0xE9)  # characters that a negated class is tried with

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


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the same code points as ascending ranges with gaps between them."""
    found: Ranges = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def without(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Ranges:
    """Return the code points of `ranges` that are in none of `others`, as `merged`."""
    left: Ranges = []
    gone = [*merged(others), (LAST + 1, LAST + 1)]
    at = 0
    for low, high in merged(ranges):
        while gone[at][1] < low:
            at += 1
        n = at
        while low <= high:
            first, last = gone[n]
            if low < first:
                left.append((low, min(high, first - 1)))
            low, n = max(low, last + 1), n + 1
    return left


@dataclass(eq=False, slots=True)
class RuleBody:
    """The alternatives of a rule, or of a group in the rule `name`."""

    name: str
    alternates: list[list[Element]] = field(default_factory=list)
    is_empty: bool = False
    n_ways: int = 0


@dataclass(eq=False, slots=True)
class Element:
    """One element of a sequence, `min_times` to `max_times` times (None: no limit): a text, one character, or a body.

    A text of several characters comes once.
    """

    text: str = ""
    ranges: Ranges = field(default_factory=list)
    negated: bool = False
    body: RuleBody | None = None
    min_times: int = 1
    max_times: int | None = 1
    n_copied: int = 0  # elements that llama.cpp copies with each round, 0: those of the text or the class

    @property
    def inner_is_empty(self) -> bool:
        return self.body.is_empty if self.body is not None else not (self.text or self.ranges)

    @property
    def may_be_empty(self) -> bool:
        return self.min_times == 0 or self.inner_is_empty

    def matches(self, code: int) -> bool:
        return any(low <= code <= high for low, high in self.ranges) != self.negated


class _Parser:
    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._at = 0
        self._rules: dict[str, RuleBody] = {ROOT: RuleBody(ROOT)}
        self._groups: list[RuleBody] = []
        self._places: dict[str, int] = {}  # of definitions, then of references
        self._references: dict[str, int] = {}
        self._name_of_rule = ""
        self._n_elements = 0

    def check(self) -> list[RuleBody]:
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

    def _body(self, name: str) -> RuleBody:
        return self._rules.setdefault(name, RuleBody(name))

    def _group(self, alternates: list[list[Element]]) -> Element:
        self._groups.append(RuleBody(self._name_of_rule, alternates))
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
                if elements[-1].text or (elements[-1].min_times, elements[-1].max_times) != (1, 1):
                    one = elements[-1]
                    elements[-1] = self._group([[one]])
                    elements[-1].n_copied = len(one.text)
                elements[-1].min_times, elements[-1].max_times = self._repetition()
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
        if self._n_elements > _MAX_ELEMENTS:
            self._fail(f"more than {_MAX_ELEMENTS:,} elements: write less", kind=AmbiguousGrammar)
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
        if len(ranges) > MAX_RANGES:
            reason = f"a class has more than {MAX_RANGES:,} characters and ranges: write ranges"
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
        min_times, max_times = (int(digits.lstrip("0")[:9] or 0) if digits else None for digits in (found[1], found[3]))
        assert min_times is not None
        end = None if found[2] and max_times is None else min_times if max_times is None else max_times
        if max(min_times, end or 0) > MAX_REPETITIONS:
            self._fail(f"more than {MAX_REPETITIONS} repetitions")
        if end is not None and end < min_times:
            self._fail(f"{found[0]} ends before it begins")
        self._at = found.end()
        return min_times, end


def left_recursive(bodies: list[RuleBody]) -> RuleBody | None:
    """Return a body that can reach itself without a character in between, None if there is none; notes in all bodies
    whether they may be empty.
    """
    rules: list[tuple[RuleBody, list[RuleBody]]] = []
    for body in bodies:
        for needed in ([one for one in alternate if not one.may_be_empty] for alternate in body.alternates):
            others = [one.body for one in needed if one.body is not None]
            rules += [(body, others)] if len(others) == len(needed) else []
    for body in _implied(rules):
        body.is_empty = True
    return _in_cycle({body: _firsts(body) for body in bodies})[0]


def check_ways(bodies: list[RuleBody]) -> None:
    """Check that llama.cpp can follow a grammar without left recursion, whose first body is the root.

    Raises:
        AmbiguousGrammar: it would take too long, or too much memory.
    """
    n_expanded = n_searched = 0
    for body in _in_cycle({body: _firsts(body) for body in bodies})[1]:
        body.n_ways = min(sum(next(iter(_ways(one)), 0) for one in map(_leftmost, body.alternates)), _MAX_SEARCHED)
        n_searched += body.n_ways
    for body in bodies:
        for element in (element for alternate in body.alternates for element in alternate):
            n = element.min_times + 1 if element.max_times is None else element.max_times
            n_expanded += n * (element.n_copied or len(element.text) or 2 * len(element.ranges) or 1) + _RULE_SIZE * (
                n - element.min_times + 1
            )
            n_searched += n * n * _inner(element) if element.inner_is_empty else 0
        widest = max((max(_ways(alternate), default=0) for alternate in body.alternates), default=0)
        if (
            max(widest, body.n_ways) > 4 * MAX_WAYS
        ):  # rules that are entered count too, as they do for llama.cpp's stack
            raise _too_many(body)
    if n_expanded > _MAX_EXPANDED or n_searched > _MAX_SEARCHED:
        raise AmbiguousGrammar("the rules are too large with all their repetitions", "Lower the repetitions.")
    work = 0
    trees = _trees(bodies)
    for body in (*bodies[1:], bodies[0]):
        work += 0 if body in trees else _Walk(body).work
        if work > _WORK:
            break


def _trees(bodies: list[RuleBody]) -> set[RuleBody]:
    """Return the bodies that match a text in one way at most, as the values of an enum: their alternatives begin with
    different characters, and hold texts and characters, with no other body than one of these at the end.
    """
    return _implied((body, ends) for body in bodies if (ends := _ends(body)) is not None)


def _implied(rules: Iterable[tuple[RuleBody, list[RuleBody]]]) -> set[RuleBody]:
    """Return the bodies of which something is true: by one of the rules, since it is of all the others in it."""
    found, ready = set[RuleBody](), list[RuleBody]()
    waiting: defaultdict[RuleBody, list[tuple[RuleBody, list[int]]]] = defaultdict(list)

    def settle(body: RuleBody, n_unknown: list[int]) -> None:
        if not n_unknown[0] and body not in found:
            found.add(body)
            ready.append(body)

    for body, others in rules:
        n_unknown = [len(others)]
        for other in others:
            waiting[other].append((body, n_unknown))
        settle(body, n_unknown)
    while ready:
        for body, n_unknown in waiting.pop(ready.pop(), ()):
            n_unknown[0] -= 1
            settle(body, n_unknown)
    return found


def _ends(body: RuleBody) -> list[RuleBody] | None:
    """Return the bodies at the ends of the alternatives of a tree, None if it cannot be one."""
    firsts: Ranges = []
    ends: list[RuleBody] = []
    for alternate in body.alternates:
        *max_times, last = [one for one in alternate if one.text or one.ranges or one.body is not None] or [Element()]
        if any((one.min_times, one.max_times) != (1, 1) or one.negated for one in (*max_times, last)):
            return None
        if any(one.body is not None for one in max_times) or (last.body is not None and not max_times):
            return None
        first = max_times[0] if max_times else last
        firsts += [(ord(first.text[0]), ord(first.text[0]))] if first.text else first.ranges
        ends += [last.body] if last.body is not None else []
    firsts.sort()
    if len(body.alternates) > MAX_WAYS:
        return None
    return ends if all(one[1] < other[0] for one, other in itertools.pairwise(firsts)) else None


def _too_many(body: RuleBody) -> AmbiguousGrammar:
    return AmbiguousGrammar(
        f"the rule {body.name} can match one text in too many ways",
        "Repeat only what is never empty, and let one text match in one way: [a-z]* instead of ([a-z]*)*.",
    )


def _leftmost(alternate: list[Element]) -> list[Element]:
    """Return the elements with which a sequence may begin."""
    n = next((n for n, one in enumerate(alternate, 1) if not one.may_be_empty), len(alternate))
    return alternate[:n]


def _firsts(body: RuleBody) -> list[RuleBody]:
    found = (one.body for alternate in body.alternates for one in _leftmost(alternate))
    return list(dict.fromkeys(one for one in found if one is not None))


def _inner(element: Element) -> int:
    return 1 + (element.body.n_ways if element.body is not None else 0)


def _ways(alternate: list[Element]) -> list[int]:
    """Return in how many ways the sequence can go on from each of its elements, at most."""
    ways: list[int] = []
    rest = 0
    for one in reversed(alternate):
        n = one.max_times or 1 if one.inner_is_empty else 1
        rest = min(n * _inner(one) + (rest if one.may_be_empty else 0), _MAX_SEARCHED)
        ways.append(rest)
    return ways[::-1]


def _in_cycle(edges: dict[RuleBody, list[RuleBody]]) -> tuple[RuleBody | None, list[RuleBody]]:
    """Return a node from which a path leads back to it, None if there is none; and the nodes, each after those that
    its edges lead to.
    """
    above, done = set[RuleBody](), dict[RuleBody, None]()
    for start in edges:
        path: list[tuple[RuleBody, Iterator[RuleBody]]] = [(start, iter(edges[start]))] if start not in done else []
        above.update(body for body, _ in path)
        while path:
            body, others = path[-1]
            other = next(others, None)
            if other is None:
                path.pop()
                above.discard(body)
                done[body] = None
            elif other in above:
                return other, []
            elif other not in done:
                above.add(other)
                path.append((other, iter(edges[other])))
    return None, list(done)


class _Walk:
    """Follows a text as llama.cpp would, from one rule on: at each step the character that most ways can go on with.

    A stack is a number, 0 the empty one; `_frames` has its top: a sequence, the place in it, how often its element has
    come (or the place in its text), and the stack below.

    Raises:
        AmbiguousGrammar: the ways become too many.
    """

    def __init__(self, body: RuleBody) -> None:
        self._n_looked = self._n_compared = 0
        self._body = body
        self._frames: list[tuple[list[Element], int, int, int]] = [([], 0, 0, 0)]
        self._numbers: dict[tuple[int, int, int, int], int] = {}
        self._known: dict[int, list[int]] = {}
        paths: Counter[int] = Counter()
        for alternate in body.alternates:
            paths.update(self._tops(self._push(alternate, 0, 0, 0)))
        for _ in range(STEPS):
            paths = self._step(paths)
            if len(paths) > MAX_WAYS or paths.total() > _MAX_PATHS:
                raise _too_many(body)

    @property
    def work(self) -> int:
        return self._n_looked + self._n_compared

    def _push(self, sequence: list[Element], at: int, n: int, below: int) -> int:
        if at == len(sequence):
            return below
        key = (id(sequence), at, n, below)
        if key not in self._numbers:
            self._numbers[key] = len(self._frames)
            self._frames.append((sequence, at, n, below))
        return self._numbers[key]

    def _after(self, stack: int) -> int:
        """Return the stack once the element on top has come one more time."""
        sequence, at, n, below = self._frames[stack]
        n, max_times = n + 1, sequence[at].max_times
        if n == max_times:
            return self._push(sequence, at + 1, 0, below)
        return self._push(sequence, at, min(n, sequence[at].min_times + 1) if max_times is None else n, below)

    def _tops(self, stack: int) -> list[int]:
        """Return the stacks that begin with a character, or are empty, without one in between."""
        if stack in self._known:
            return self._known[stack]
        todo, seen, found = [stack], set[int](), list[int]()
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            self._n_looked += 1
            if self._n_looked > _RULE_WORK:
                raise _too_many(self._body)
            sequence, at, n, below = self._frames[one]
            if not one:
                found.append(one)
                continue
            element = sequence[at]
            if element.text or (element.ranges and element.max_times != 0):
                found.append(one)
            elif element.body is not None and element.max_times != 0:
                after = self._after(one)
                todo += [self._push(alternate, 0, 0, after) for alternate in element.body.alternates]
            if not element.text and (n >= element.min_times or not (element.ranges or element.body)):
                todo.append(self._push(sequence, at + 1, 0, below))
        self._known[stack] = found
        return found

    def _next(self, stack: int, code: int) -> int | None:
        """Return the stack after a character, None if it does not match."""
        sequence, at, n, below = self._frames[stack]
        if not stack:
            return None
        element = sequence[at]
        if not element.text:
            return self._after(stack) if element.matches(code) else None
        if ord(element.text[n]) != code:
            return None
        is_last = n + 1 == len(element.text)
        return self._push(sequence, at + is_last, 0 if is_last else n + 1, below)

    def _step(self, paths: Counter[int]) -> Counter[int]:
        codes: Counter[int] = Counter()
        for stack, n in paths.items():
            codes.update(dict.fromkeys(self._codes(stack), n))
        best: Counter[int] = Counter()
        for code, _ in codes.most_common(4) if len(codes) > 1 else codes.items():
            new: Counter[int] = Counter()
            self._n_compared += len(paths)
            for stack, n in paths.items():
                if (after := self._next(stack, code)) is not None:
                    for top in self._tops(after):
                        new[top] += n
            best = max(best, new, key=Counter.total)
        return best

    def _codes(self, stack: int) -> Iterable[int]:
        """Return characters that stand for those that a stack can go on with."""
        sequence, at, n, _ = self._frames[stack]
        if not stack:
            return ()
        element = sequence[at]
        if element.text:
            return (ord(element.text[n]),)
        if element.negated:
            return tuple(code for code in _PROBES if element.matches(code))[:2]
        return tuple(low for low, _ in element.ranges[:8]) if element.ranges[0] != (0, LAST) else _PROBES[:2]
