"""Tests the variety of questions that training makes by itself."""

from __future__ import annotations

import random

from demo import arithmetic
from demo.augment import augment, typo


def test_the_same_seed_gives_the_same_variants() -> None:
    def draw() -> list[str]:
        rng = random.Random(3)
        return [augment("How do I stop an answer?", rng) for _ in range(50)]

    assert draw() == draw()
    assert len(set(draw())) > 30


def test_strength_zero_changes_nothing() -> None:
    assert augment("How do I stop?", random.Random(1), 0.0) == "How do I stop?"


def test_a_variant_is_never_empty() -> None:
    rng = random.Random(5)
    assert all(augment("?", rng).strip() for _ in range(200))
    assert all(augment("hi", rng).strip() for _ in range(200))


def test_a_typo_leaves_short_words_alone() -> None:
    rng = random.Random(2)
    assert typo("how do I go", rng) == "how do I go"
    assert typo("telemetry", rng) != "telemetry"


def test_sums_are_right() -> None:
    rng = random.Random(4)
    for _ in range(500):
        _, answer, reason = arithmetic.sample(rng)
        if answer == arithmetic.TOO_LARGE:
            assert reason == ""
            continue
        a, sign, b, _, result = answer.rstrip(".").split()
        assert eval(f"{a}{ {'plus': '+', 'minus': '-', 'times': '*'}[sign] }{b}") == int(result)
