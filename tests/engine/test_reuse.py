"""Tests what of a chat is re-evaluated: after the next turn, an edit, another chat, a restart."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.base import paths
from cpuchat.base.errors import GenerationFailed
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.protocol.messages import Message, Sampling, TextDelta
from tests.engine.conftest import OPTIONS
from tests.support.engine_chat import LONG, Chat, assistant, user


def test_next_turn_reuses_everything_that_was_said(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    turns: list[Message] = []
    n_past = 0
    for question in (LONG, "And then?", "Why is that so?", "Go on."):
        turns.append(user(question))
        timings = chat.ask(*turns)
        assert timings.cache_n == n_past
        # New are the last token of the answer, the end of its turn, and the question.
        marks = "<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
        assert timings.prompt_n < len(question) + len(marks)
        turns.append(assistant(chat.text))
        n_past = timings.n_past


def test_answer_trimmed_by_the_interface_still_reuses(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    first = chat.ask(user(LONG))
    cut = chat.text[:-3]
    second = chat.ask(user(LONG), assistant(cut), user("And?"))
    assert second.cache_n >= first.n_past - 4


def test_edit_keeps_what_comes_before(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    first = chat.ask(user(LONG))
    answer = assistant(chat.text)
    chat.ask(user(LONG), answer, user("And then?"))
    edited = chat.ask(user(LONG), answer, user("Or rather?"))
    assert edited.cache_n >= first.n_past
    assert chat.ask(user(LONG.replace("layers", "tokens")), answer, user("Hm?")).cache_n < len(LONG)


def test_regenerating_takes_the_prompt_from_the_cache(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    first = chat.ask(user(LONG))
    text = chat.text
    again = chat.ask(user(LONG))
    assert chat.text == text
    assert (again.cache_n, again.prompt_n, again.prompt_per_second) == (first.prompt_n, 0, None)


def test_restart_goes_on_where_it_was(tiny_model: Path, tmp_path: Path) -> None:
    first = Chat()
    first.load(tiny_model, state_dir=tmp_path / "kv")
    before = first.ask(user(LONG), chat_id="a")
    turns = (user(LONG), assistant(first.text), user("And then?"))
    first.engine.close()

    second = Chat()
    second.load(tiny_model, state_dir=tmp_path / "kv")
    after = second.ask(*turns, chat_id="a")
    restored = second.text
    assert after.cache_n == before.n_past
    second.engine.close()

    unbroken = Chat()
    unbroken.load(tiny_model)
    unbroken.ask(user(LONG))
    assert unbroken.ask(*turns).cache_n == before.n_past
    assert unbroken.text == restored
    unbroken.engine.close()


def test_changing_chats_brings_each_back(chat: Chat, tiny_model: Path, tmp_path: Path) -> None:
    chat.load(tiny_model, state_dir=tmp_path / "kv")
    one = chat.ask(user(LONG), chat_id="one")
    turns = (user(LONG), assistant(chat.text), user("And then?"))
    assert chat.ask(user("Something else entirely " * 5), chat_id="two").cache_n < 30
    assert chat.ask(*turns, chat_id="one").cache_n == one.n_past


def test_a_refused_prompt_does_not_save_one_chat_as_another(
    chat: Chat, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kv"
    chat.load(tiny_model, state_dir=folder)
    chat.ask(user("The secret of the first chat. " * 4), chat_id="first")

    def refuse(*_: object, **__: object) -> None:
        raise GenerationFailed("llama.cpp could not evaluate the text: refused.")

    with monkeypatch.context() as refusing:
        refusing.setattr(Sequence, "extend", refuse)
        chat.request(messages=(user("Something else"),), chat_id="second")
        assert chat.failure.code == "generation_failed"
    chat.engine.idle()
    chat.engine.close()
    (saved,) = folder.iterdir()
    assert saved.name.startswith(paths.kv_stem("first"))


def test_damaged_saved_state_only_costs_time(chat: Chat, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    chat.load(tiny_model, state_dir=folder)
    chat.ask(user(LONG), chat_id="a")
    chat.restart()
    state = next(folder.glob("*.kv"))
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 4
    state.write_bytes(data)
    chat.load(tiny_model, state_dir=folder)
    assert chat.ask(user(LONG), chat_id="a").cache_n == 0
    assert list(folder.iterdir()) == []


def test_state_is_not_shared_between_cache_types(chat: Chat, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    chat.load(tiny_model, state_dir=folder)
    chat.ask(user(LONG), chat_id="a")
    chat.load(tiny_model, msgspec.structs.replace(OPTIONS, type_k="f32", type_v="f32"), state_dir=folder)
    assert chat.ask(user(LONG), chat_id="a").cache_n == 0
    # Another context size is no reason to start over.
    chat.load(tiny_model, msgspec.structs.replace(OPTIONS, n_ctx=1024), state_dir=folder)
    assert chat.ask(user(LONG), chat_id="a").cache_n > len(LONG) // 2


def test_recurrent_model(chat: Chat, recurrent_model: Path, tmp_path: Path) -> None:
    chat.load(recurrent_model, state_dir=tmp_path / "kv")
    first = chat.ask(user(LONG), chat_id="a")
    turns = (user(LONG), assistant(chat.text), user("And then?"))
    assert chat.ask(*turns, chat_id="a").cache_n == first.n_past
    again = chat.text
    # The state has moved on: a checkpoint has kept what it was before the answer.
    assert chat.ask(*turns, chat_id="a").prompt_n == 0
    assert chat.text == again
    chat.load(recurrent_model, state_dir=tmp_path / "kv")
    longer = (*turns, assistant(again), user("Good."))
    assert chat.ask(*longer, chat_id="a").cache_n > first.n_past
    chat.react = lambda e: chat.engine.cancel() if isinstance(e, TextDelta) else None
    chat.ask(*longer, assistant(chat.text), user("More"), chat_id="a", max_tokens=0)
    assert chat.stop_reason == "cancelled"
    chat.react = lambda _: None
    assert chat.ask(*longer, assistant("x"), user("More"), chat_id="a").predicted_n == 24


def test_a_continued_answer_is_the_one_that_was_not_stopped(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    greedy = {"sampling": Sampling(temperature=0.0)}
    chat.ask(user(LONG), **greedy)
    whole = chat.text
    chat.ask(user(LONG), max_tokens=9, **greedy)
    begun = chat.text
    assert whole.startswith(begun) and 0 < len(begun) < len(whole)
    timings = chat.ask(user(LONG), assistant(begun), continues=True, max_tokens=24 - 9, **greedy)
    assert begun + chat.text == whole
    assert timings.prompt_n <= 2  # the last token of what is there
    chat.restart()  # nothing is known of it
    chat.load(tiny_model)
    chat.ask(user(LONG), Message(role="assistant", content="", reasoning="Well"), continues=True, **greedy)
    assert {delta.channel for delta in chat.of(TextDelta)} == {"reasoning"}
