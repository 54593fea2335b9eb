"""Tests comparisons in the chat database."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import ChatsChanged, ChatsError
from cpuchat.chats.store import ChatStore
from cpuchat.compare.agreement import Written, score_answers
from cpuchat.compare.comparison import KeptComparison, sides_of, turns_of
from cpuchat.compare.runner import Round, Side, SideAnswer, Turn
from cpuchat.protocol.messages import TextDelta
from tests.compare.test_agreement import Sides
from tests.support.scripted_backend import timings

SIDES = (
    Side(path="/m/q8.gguf", model="Qwen", quantization="Q8_0"),
    Side(path="/m/q4.gguf", changes={"threads": "2"}, model="Qwen", quantization="Q4_K_M"),
)


def a_round(a: str, b: str) -> Round:
    answers = [SideAnswer(content=text, stop_reason="end", timings=timings(len(text.split()))) for text in (a, b)]
    return Round(answers=(answers[0], answers[1]))


def test_a_comparison_is_a_chat_with_two_answers_to_each_prompt(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats.db")
    kept = KeptComparison(store, SIDES)
    turns = [Turn("Why is it slow?", [a_round("Bytes.", "Because of bytes.")])]
    kept.keep(turns)
    turns.append(Turn("And now?", [a_round("Still.", "Yet.")]))
    kept.keep(turns)
    turns[-1].rounds.append(a_round("Still again.", "Yet again."))
    kept.keep(turns)

    (chat,) = store.chats()
    assert chat.title == "Q8_0 against Q4_K_M · threads 2: Why is it slow?"
    assert sides_of(chat) == SIDES
    messages = store.messages(chat.id)
    assert [message.content for message in messages] == [
        "Why is it slow?", "Bytes.", "Because of bytes.", "And now?", "Still again.", "Yet again.",
    ]  # fmt: skip
    assert messages[2].model == "Qwen Q4_K_M · threads 2"
    read = turns_of(chat, messages)
    assert [turn.prompt for turn in read] == ["Why is it slow?", "And now?"]
    assert [answer.content for answer in read[1].rounds[0].answers] == ["Still again.", "Yet again."]
    assert read[0].rounds[0].answers[0].timings == timings(1)
    assert store.search("again") and store.search("against")

    more = KeptComparison(store, SIDES, chat.id, len(read))
    more.keep([*read, Turn("Third", [a_round("A", "B")])])
    assert len(store.messages(chat.id)) == 9
    repeated = KeptComparison(store, SIDES, chat.id, 3)
    repeated.keep([*read, Turn("Third", [a_round("A", "B"), a_round("A2", "B2")])])
    assert [message.content for message in store.messages(chat.id)][6:] == ["Third", "A2", "B2"]


async def test_the_times_of_tokens_and_the_agreement_are_kept(tmp_path: Path) -> None:
    store, kept = ChatStore(tmp_path / "chats.db"), KeptComparison(ChatStore(tmp_path / "chats.db"), SIDES)
    done = a_round("Bytes are it.", "Bytes.")
    for answer, pieces in zip(done.answers, (["Bytes", " are", " it."], ["Byt", "es."]), strict=True):
        for number, text in enumerate(pieces):
            by = "draft" if number == 1 else ""
            answer.written.add(TextDelta(request_id=1, text=text, n_tokens=1, at_ms=30.0 + 20 * number, drafter=by))
    kept.keep([Turn("Why?", [done])])
    ends = [one.written.ends for one in done.answers]
    done.agreement = await score_answers(
        (Written((1,), (5, 6, 7), "Bytes are it.", ends[0]), Written((1,), (5, 8), "Bytes.", ends[1])),
        100,
        Sides({}).run,
    )
    kept.keep([Turn("Why?", [done])])

    def opened() -> Round:
        (turn,) = turns_of(store.chat(kept.chat_id), store.messages(kept.chat_id))
        return turn.rounds[0]

    again = opened()
    assert [list(one.written.tokens()) for one in again.answers] == [list(one.written.tokens()) for one in done.answers]
    assert again.answers[0].written.drafters == ("", "draft", "")
    assert again.agreement is not None and again.agreement.answers == done.agreement.answers
    store.update_message(store.messages(kept.chat_id)[1].id, content="Edited.")
    again = opened()
    assert again.answers[0].written.n_tokens == 0 and again.answers[1].written.n_tokens == 2
    assert again.agreement is None
    store._db.execute("UPDATE messages SET recording = '[damaged'")
    assert opened().answers[1].written.n_tokens == 0


def test_a_side_without_an_answer_keeps_its_place(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats.db")
    kept = KeptComparison(store, SIDES)
    kept.keep([Turn("Why?", [Round(answers=(SideAnswer(), a_round("x", "Because.").answers[1]))])])
    (turn,) = turns_of(store.chat(kept.chat_id), store.messages(kept.chat_id))
    assert [answer.content for answer in turn.rounds[0].answers] == ["", "Because."]
    assert not turn.rounds[0].complete
    store.delete(kept.chat_id)
    with pytest.raises(ChatsChanged):
        kept.keep([turn, Turn("And?", [a_round("a", "b")])])
    with pytest.raises(ChatsError, match="Delete it"):
        sides_of(store.create_chat("m", sides="[{]"))


def test_a_finished_round_stays_and_how_it_ended_is_kept(tmp_path: Path) -> None:
    store = ChatStore(tmp_path / "chats.db")
    kept = KeptComparison(store, SIDES)
    fair, stopped, disturbed = a_round("Fast.", "Faster."), a_round("Half", "an"), a_round("Slow.", "Slower.")
    stopped.answers[1].stop_reason = "cancelled"
    for answer in disturbed.answers:
        answer.timings = msgspec.structs.replace(timings(1), predicted_ms=400.0, cpu_wait=0.5)
    turn = Turn("Why?", [fair])
    kept.keep([turn])
    for later in (stopped, disturbed):
        turn.rounds.append(later)
        kept.keep([turn])

    def opened() -> list[Turn]:
        return turns_of(store.chat(kept.chat_id), store.messages(kept.chat_id))

    (found,) = opened()
    assert [answer.content for answer in found.rounds[0].answers] == ["Fast.", "Faster."]
    assert found.rounds[0].complete
    kept.keep([turn, Turn("And?", [stopped])])
    kept.keep([turn, Turn("And?", [stopped]), Turn("Then?", [disturbed])])
    assert [one.rounds[0].stopped for one in opened()] == [False, True, False]
    assert [one.rounds[0].disturbed for one in opened()] == [False, False, True]
