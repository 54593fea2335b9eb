"""Tests what of a chat is re-evaluated: after the next turn, an edit, another chat, a restart."""

from __future__ import annotations

from pathlib import Path

import msgspec

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


def test_state_is_not_shared_between_cache_types(chat: Chat, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    chat.load(tiny_model, state_dir=folder)
    chat.ask(user(LONG), chat_id="a")
    chat.load(tiny_model, msgspec.structs.replace(OPTIONS, type_k="f32", type_v="f32"), state_dir=folder)
    assert chat.ask(user(LONG), chat_id="a").cache_n == 0
    # Another context size is no reason to start over.
    chat.load(tiny_model, msgspec.structs.replace(OPTIONS, n_ctx=1024), state_dir=folder)
    assert chat.ask(user(LONG), chat_id="a").cache_n > len(LONG) // 2


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
