"""Tests questions put together from parts."""

from __future__ import annotations

import random

from demo.corpus import load_topics
from demo.judge import load_keys, words
from demo.phrasing import load_parts, pick, variants

RUN = 5


def test_every_part_belongs_to_a_topic_and_is_well_formed() -> None:
    keys = {topic.key for topic in load_topics()}
    for key, parts in load_parts().items():
        assert key in keys
        assert all(part.count("{") == part.count("}") for part in parts.all())
        assert all(not set("{}|") & set(text) for part in parts.all() for text in variants(part))


def test_no_part_shares_five_words_in_a_row_with_a_held_back_question() -> None:
    def runs(text: str) -> set[tuple[str, ...]]:
        said = words(text)
        return {tuple(said[i : i + RUN]) for i in range(len(said) - RUN + 1)}

    held_back = set().union(*(runs(key.text) for key in load_keys()))
    parts = [text for entry in load_parts().values() for part in entry.all() for text in variants(part)]
    assert [text for text in parts if runs(text) & held_back] == []


def test_choices_are_made() -> None:
    rng = random.Random(1)
    assert {pick(("{a|b} c", "d"), rng) for _ in range(50)} == {"a c", "b c", "d"}
    assert sorted(variants("{a|b} {c|d}")) == ["a c", "a d", "b c", "b d"]


def test_composed_questions_are_many_and_repeatable() -> None:
    parts = load_parts()["cpuchat:stop-answer"]

    def draw() -> list[str]:
        rng = random.Random(2)
        return [parts.compose(rng) for _ in range(200)]

    assert draw() == draw()
    assert len(set(draw())) > 150
