"""Bounds what llama.cpp has to do to follow a grammar, before it is given one.

llama.cpp keeps a stack for every way to read the text, expands each repetition into a rule per round, and searches for
left recursion without remembering where it has been: a grammar of 40 bytes can take minutes and gigabytes. Everything
here is counted, never timed: the limits are the same on every machine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from cpuchat.base.errors import AmbiguousGrammar
from cpuchat.grammar.characters import LAST, Ranges

MOST_WAYS: Final = 4096
"""Ways to read a text that llama.cpp may have to follow at once."""
_MOST_PATHS: Final = 1 << 22
"""Ways to reach them within `STEPS` characters: llama.cpp's check of a token does not merge those that meet."""
STEPS: Final = 16
"""Characters of a text that are tried; longer tokens are not used under a grammar."""
_MOST_EXPANDED: Final = 2_000_000  # elements of the expanded rules, some 30 bytes each
_RULE_SIZE: Final = 8  # elements that a rule takes as much memory as
_MOST_SEARCHED: Final = 20_000_000  # rules that the search for left recursion enters
_RULE_WORK, _WORK = 100_000, 150_000  # stacks looked at, from one rule on and from all
_PROBES: Final = (0x61, 0x20, 0x30, 0x41, 0x2D, 0xE9)  # characters that a negated class is tried with


@dataclass(eq=False, slots=True)
class Body:
    """The alternatives of a rule, or of a group in the rule `name`."""

    name: str
    alternates: list[list[Element]] = field(default_factory=list)
    is_empty: bool = False
    n_ways: int = 0


@dataclass(eq=False, slots=True)
class Element:
    """One element of a sequence, `least` to `most` times (None: no limit): a text, one character, or a body.

    A text of several characters comes once.
    """

    text: str = ""
    ranges: Ranges = field(default_factory=list)
    negated: bool = False
    body: Body | None = None
    least: int = 1
    most: int | None = 1
    n_copied: int = 0  # elements that llama.cpp copies with each round, 0: those of the text or the class

    @property
    def inner_is_empty(self) -> bool:
        return self.body.is_empty if self.body is not None else not (self.text or self.ranges)

    @property
    def may_be_empty(self) -> bool:
        return self.least == 0 or self.inner_is_empty

    def matches(self, code: int) -> bool:
        return any(low <= code <= high for low, high in self.ranges) != self.negated


def left_recursive(bodies: list[Body]) -> Body | None:
    """Return a body that can reach itself without a character in between, None if there is none; notes in all bodies
    whether they may be empty.
    """
    _find_empty(bodies)
    return _in_cycle({body: _firsts(body) for body in bodies})[0]


def check_ways(bodies: list[Body]) -> None:
    """Check that llama.cpp can follow a grammar without left recursion, whose first body is the root.

    Raises:
        AmbiguousGrammar: it would take too long, or too much memory.
    """
    n_expanded = n_searched = 0
    for body in _in_cycle({body: _firsts(body) for body in bodies})[1]:
        body.n_ways = min(sum(next(iter(_ways(one)), 0) for one in map(_leftmost, body.alternates)), _MOST_SEARCHED)
        n_searched += body.n_ways
    for body in bodies:
        for element in (element for alternate in body.alternates for element in alternate):
            n = element.least + 1 if element.most is None else element.most
            n_expanded += n * (element.n_copied or len(element.text) or 2 * len(element.ranges) or 1) + _RULE_SIZE * (
                n - element.least + 1
            )
            n_searched += n * n * _inner(element) if element.inner_is_empty else 0
        widest = max((max(_ways(alternate), default=0) for alternate in body.alternates), default=0)
        if (
            max(widest, body.n_ways) > 4 * MOST_WAYS
        ):  # rules that are entered count too, as they do for llama.cpp's stack
            raise _too_many(body)
    if n_expanded > _MOST_EXPANDED or n_searched > _MOST_SEARCHED:
        raise AmbiguousGrammar("the rules are too large with all their repetitions", "Lower the repetitions.")
    work = 0
    for body in (*bodies[1:], bodies[0]):
        work += _Walk(body).work
        if work > _WORK:
            break


def _too_many(body: Body) -> AmbiguousGrammar:
    return AmbiguousGrammar(
        f"the rule {body.name} can match one text in too many ways",
        "Repeat only what is never empty, and let one text match in one way: [a-z]* instead of ([a-z]*)*.",
    )


def _find_empty(bodies: list[Body]) -> None:
    """Note which bodies may be empty; each sequence counts its elements of which that is not yet known."""
    waiting: defaultdict[Body, list[tuple[list[int], Body]]] = defaultdict(list)
    ready: list[Body] = []

    def settle(n_unknown: list[int], body: Body) -> None:
        if not n_unknown[0] and not body.is_empty:
            body.is_empty = True
            ready.append(body)

    for body in bodies:
        for alternate in body.alternates:
            unknown = [one for one in alternate if not one.may_be_empty]
            n_unknown = [len(unknown)]
            for one in unknown:
                if one.body is not None:
                    waiting[one.body].append((n_unknown, body))
            settle(n_unknown, body)
    while ready:
        for n_unknown, body in waiting.pop(ready.pop(), ()):
            n_unknown[0] -= 1
            settle(n_unknown, body)


def _leftmost(alternate: list[Element]) -> list[Element]:
    """Return the elements with which a sequence may begin."""
    n = next((n for n, one in enumerate(alternate, 1) if not one.may_be_empty), len(alternate))
    return alternate[:n]


def _firsts(body: Body) -> list[Body]:
    found = (one.body for alternate in body.alternates for one in _leftmost(alternate))
    return list(dict.fromkeys(one for one in found if one is not None))


def _inner(element: Element) -> int:
    return 1 + (element.body.n_ways if element.body is not None else 0)


def _ways(alternate: list[Element]) -> list[int]:
    """Return in how many ways the sequence can go on from each of its elements, at most."""
    ways: list[int] = []
    rest = 0
    for one in reversed(alternate):
        n = one.most or 1 if one.inner_is_empty else 1
        rest = min(n * _inner(one) + (rest if one.may_be_empty else 0), _MOST_SEARCHED)
        ways.append(rest)
    return ways[::-1]


def _in_cycle(edges: dict[Body, list[Body]]) -> tuple[Body | None, list[Body]]:
    """Return a node from which a path leads back to it, None if there is none; and the nodes, each after those that
    its edges lead to.
    """
    above, done = set[Body](), dict[Body, None]()
    for start in edges:
        path: list[tuple[Body, Iterator[Body]]] = [(start, iter(edges[start]))] if start not in done else []
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

    def __init__(self, body: Body) -> None:
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
            if len(paths) > MOST_WAYS or paths.total() > _MOST_PATHS:
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
        n, most = n + 1, sequence[at].most
        if n == most:
            return self._push(sequence, at + 1, 0, below)
        return self._push(sequence, at, min(n, sequence[at].least + 1) if most is None else n, below)

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
            if element.text or (element.ranges and element.most != 0):
                found.append(one)
            elif element.body is not None and element.most != 0:
                after = self._after(one)
                todo += [self._push(alternate, 0, 0, after) for alternate in element.body.alternates]
            if not element.text and (n >= element.least or not (element.ranges or element.body)):
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
