"""Tests the rule that says whether the demo model answered rightly."""

from __future__ import annotations

import pytest

from demo.corpus import answer_texts, load_topics
from demo.judge import Key, Reference, judge, load_keys

KEY = Key("how do I stop", "stop-answer", (("esc",), ("stop", "end")), ("ctrl+q",))
REFERENCE = Reference(["Press **Esc** to stop the answer. What was said so far stays in the chat."])


def test_every_list_of_the_key_must_be_met() -> None:
    assert judge("Press Esc to stop.", KEY).right
    assert judge("Esc ends it.", KEY).right
    assert judge("Press F2 to stop.", KEY).missing == (("esc",),)


def test_a_forbidden_text_fails() -> None:
    verdict = judge("Esc stops, Ctrl+Q too.", KEY)
    assert verdict.forbidden == ("ctrl+q",)
    assert not verdict.passed


@pytest.mark.parametrize(
    "answer, fault",
    [
        ("Esc.", "only 1 words"),
        ("Press **Esc** to stop the answer", "does not end"),
        ("Press Press **Esc** to stop the answer.", "repeats"),
        ("Press **Esc** to stop the answer, to stop the answer.", "repeats"),
        ("Press **Esc** to stop the zebra.", "unknown words"),
        ("The chat stays so far, said what was in the answer.", "word runs"),
    ],
)
def test_broken_text_is_not_fluent(answer: str, fault: str) -> None:
    assert any(fault in found for found in REFERENCE.faults(answer))


def test_the_corpus_own_answers_are_fluent() -> None:
    answers = answer_texts(load_topics())
    reference = Reference(answers)
    assert {a: f for a in answers if (f := reference.faults(a))} == {}


def test_every_key_is_met_by_the_answers_of_its_topic() -> None:
    topics = load_topics()
    for key in load_keys():
        answers = [topic.answers for topic in topics if topic.name == key.topic]
        assert answers, key.topic
        assert any(all(judge(a, key).right for a in group) for group in answers), key.text


def test_held_back_questions_are_not_in_the_corpus() -> None:
    def plain(text: str) -> str:
        return "".join(c for c in text.lower() if c.isalnum())

    known = {plain(q) for topic in load_topics() for q in topic.questions}
    assert len(load_keys()) == 50
    assert [key.text for key in load_keys() if plain(key.text) in known] == []
