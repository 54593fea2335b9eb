"""Small sums, made by code."""

from __future__ import annotations

import random

TOO_LARGE = "That is too large for me. I only add and subtract up to 20, and multiply up to 10 times 10."
_NAMES = {"+": "plus", "-": "minus", "*": "times"}
_ASK = (
    "what is {a} {word} {b}", "{a} {sign} {b}", "{a}{sign}{b}", "{a} {sign} {b} =", "{a}{sign}{b}=?",
    "{a} {word} {b}", "how much is {a} {word} {b}", "calculate {a} {sign} {b}", "can you calculate {a} {word} {b}",
    "compute {a}{sign}{b}", "what's {a} {sign} {b}", "what does {a} {word} {b} make", "please work out {a} {word} {b}",
    "do the sum {a} {sign} {b}", "tell me what {a} {word} {b} is", "how many is {a} {word} {b}",
    "solve {a} {sign} {b}", "what do you get for {a}{sign}{b}",
)  # fmt: skip
_SPECIAL = {
    "+": ("add {a} and {b}", "the sum of {a} and {b}", "what is the sum of {a} and {b}", "add {b} to {a}"),
    "-": ("subtract {b} from {a}", "take {b} away from {a}", "what is left when I take {b} from {a}"),
    "*": ("multiply {a} by {b}", "the product of {a} and {b}", "multiply {a} and {b}", "{a} x {b}", "{a}x{b}"),
}
_REASON = {
    "+": "Start at {a} and count {b} further: you get {c}.",
    "-": "Start at {a} and count {b} back: you get {c}.",
    "*": "Put {a} groups of {b} together: you get {c}.",
}


def sample(rng: random.Random) -> tuple[str, str, str]:
    """(question, answer, reason) of one random sum; now and then one that is too large, with the reason left empty."""
    sign = rng.choice("+++--**")
    if rng.random() < 0.1:
        most = rng.choice((99, 9999))
        a, b = rng.randint(21, most), rng.randint(11, most)
        return question(a, sign, b, rng), TOO_LARGE, ""
    a = rng.randint(0, 10 if sign == "*" else 20)
    b = rng.randint(0, {"+": 20 - a, "-": a, "*": 10}[sign])
    if sign == "+" and rng.random() < 0.5:
        a, b = b, a
    return question(a, sign, b, rng), answer(a, sign, b), _REASON[sign].format(a=a, b=b, c=result(a, sign, b))


def question(a: int, sign: str, b: int, rng: random.Random) -> str:
    """One of the ways to ask for a sum."""
    forms = _SPECIAL[sign] if rng.random() < 0.25 else _ASK
    return rng.choice(forms).format(a=a, b=b, sign=sign, word=_NAMES[sign])


def answer(a: int, sign: str, b: int) -> str:
    """The sum in a sentence."""
    return f"{a} {_NAMES[sign]} {b} is {result(a, sign, b)}."


def result(a: int, sign: str, b: int) -> int:
    """The value of "a sign b"."""
    return {"+": a + b, "-": a - b, "*": a * b}[sign]
