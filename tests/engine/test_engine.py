"""Tests the whole engine: commands in, events out, a real model between; and what of a chat is re-evaluated."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec
import pytest

from cpuchat.hardware.sysfs import own_cpus
from cpuchat.protocol.messages import (
    ContextTrimmed,
    LoadCancelled,
    LoadModel,
    LoadProgress,
    Message,
    ModelLoaded,
    PrefillProgress,
    Sampling,
    TextDelta,
)
from tests.engine.conftest import OPTIONS
from tests.support.cores import ONE_CPU
from tests.support.engine_chat import LONG, Chat, assistant, user
from tests.support.tiny_gguf import write_tiny_gguf


def test_failed_load(chat: Chat, tmp_path: Path) -> None:
    chat.engine.load(LoadModel(path=str(tmp_path / "none.gguf"), cpus=ONE_CPU))
    assert chat.failure.code == "model_not_found"
    chat.request(messages=(user("Hello"),))
    assert chat.failure.code == "usage" and "No model" in chat.failure.message


def test_cancelled_load(chat: Chat, tiny_model: Path) -> None:
    chat.react = lambda e: chat.engine.cancel() if isinstance(e, LoadProgress) else None
    chat.engine.load(LoadModel(path=str(tiny_model), cpus=ONE_CPU, options=OPTIONS))
    assert isinstance(chat.events[-1], LoadCancelled)
    chat.engine.clear_cancel()
    chat.react = lambda _: None
    chat.load(tiny_model)


def test_one_answer(chat: Chat, tiny_model: Path) -> None:
    info = chat.load(tiny_model)
    assert info.n_ctx == 512 and info.has_template
    assert chat.of(LoadProgress) and isinstance(chat.events[-1], ModelLoaded)
    timings = chat.ask(user("Hello"))
    assert chat.stop_reason == "max_tokens"
    prefill, deltas = chat.of(PrefillProgress), chat.of(TextDelta)
    assert (prefill[0].processed, prefill[-1].processed) == (0, prefill[-1].total)
    assert timings.prompt_n == prefill[-1].total and timings.cache_n == 0
    assert timings.predicted_n == 24 == sum(d.n_tokens for d in deltas)
    assert timings.n_past == timings.prompt_n + 23 and timings.n_ctx == 512
    assert timings.seed == 11
    assert timings.prompt_ms > 0 and timings.predicted_ms > 0 and timings.overhead_us > 0
    assert timings.ttft_ms >= timings.prompt_ms
    assert (timings.prompt_per_second or 0) > 0 and (timings.predicted_per_second or 0) > 0
    assert deltas[0].at_ms >= timings.ttft_ms
    assert [type(e) for e in chat.events[: len(prefill)]] == [PrefillProgress] * len(prefill)


def test_long_chat_is_trimmed_and_told(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    turns = [m for i in range(8) for m in (user(f"{i} {LONG}"), assistant(f"Answer {i}"))]
    chat.ask(Message(role="system", content="Be brief."), *turns, user("Last one"))
    (trimmed,) = chat.of(ContextTrimmed)
    assert isinstance(chat.events[0], ContextTrimmed)
    assert 0 < trimmed.dropped_messages < 17 and trimmed.dropped_tokens > 0 and trimmed.n_ctx == 512
    assert chat.of(PrefillProgress)[-1].total <= 512


def test_far_too_many_messages_are_refused_at_the_size_of_the_context(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    chat.request(messages=(user(""),) * 5_000, when_full="refuse")
    assert chat.failure.code == "context_full" and "about" in chat.failure.message  # the rest was not tokenized
    assert 20_000 < chat.failure.n_tokens < 60_000
    assert chat.ask(user("short")).predicted_n == 24


def test_a_cancel_before_the_prompt_is_tokenized_is_obeyed(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    chat.engine.cancel()
    timings = chat.ask(*(user(""),) * 5_000, when_full="drop")
    assert chat.stop_reason == "cancelled" and timings.prompt_n == 0
    assert chat.ask(user("short")).predicted_n == 24


def test_a_larger_context_is_advised_where_the_model_has_one(chat: Chat, tiny_model: Path, tmp_path: Path) -> None:
    small = write_tiny_gguf(tmp_path / "small.gguf", n_ctx_train=512)
    for path, hint in (
        (tiny_model, "Shorten it, or raise the context size (Alt+S in the app, or --ctx)."),
        (small, "Shorten it."),
    ):
        chat.load(path)
        chat.request(messages=(user("x y z " * 200),))
        assert chat.failure.hint == hint


def test_raw_prompt(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    assert chat.ask(prompt="abc").prompt_n == 3
    assert chat.ask(prompt="abc" + chat.text + "!").prompt_n <= 2
    chat.request(prompt="")
    assert chat.failure.code == "usage"
    chat.request()
    assert chat.failure.code == "usage"


def test_model_without_template(chat: Chat, tiny_model_without_template: Path) -> None:
    info = chat.load(tiny_model_without_template)
    assert not info.has_template
    assert any("No chat template" in note for note in info.notes)
    timings = chat.ask(user("Hello"))
    assert timings.predicted_n == 24
    assert timings.prompt_n == len("User: Hello\nAssistant:") - 3  # "er", "ll" and "an" are tokens


def listed_threads(expected: int = 0) -> int:
    """Return the threads in the kernel's list; with `expected`, once there are no more than that, or time is up."""
    deadline = time.monotonic() + 10
    while (n := len(list(Path("/proc/self/task").iterdir()))) > expected > 0 and time.monotonic() < deadline:
        os.sched_yield()
    return n


def test_nothing_is_left_behind(tiny_model: Path) -> None:
    python_threads = threading.active_count()
    chat = Chat()
    for _ in range(3):
        chat.load(tiny_model)
        chat.ask(user("Hello"))
    chat.engine.close()
    threads = listed_threads()
    chat = Chat()
    chat.load(tiny_model, cpus=own_cpus()[:2])
    chat.ask(user("Hello"))
    chat.engine.close()
    chat.engine.close()
    assert listed_threads(threads) <= threads
    assert threading.active_count() <= python_threads  # one of an earlier test may have ended meanwhile


def test_states_take_at_most_half_of_the_memory_that_the_model_leaves(
    chat: Chat, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cpuchat.engine.engine.available_for_model", lambda: 2_000_000_000)
    limits: list[int] = []
    for limit in (10**12, 1000):
        chat.engine.load(LoadModel(path=str(tiny_model), cpus=ONE_CPU, options=OPTIONS, state_limit=limit))
        loaded = chat.events[-1]
        assert isinstance(loaded, ModelLoaded)
        limits.append(loaded.model.state_memory)
    assert 0 < limits[0] < 1_000_000_000
    assert limits[1] == 1000


def test_a_chat_that_must_be_whole_leaves_room_for_the_answer(chat: Chat, tiny_model: Path) -> None:
    chat.load(tiny_model)
    nearly_full = user("x y z " * 74)  # 444 tokens of 512, and those of the template
    assert chat.ask(nearly_full, when_full="refuse", max_tokens=1).predicted_n == 1
    assert chat.ask(nearly_full, when_full="refuse_early", max_tokens=1).predicted_n == 1
    turns = (nearly_full, assistant("Yes."), user("And?"))
    chat.request(messages=turns, when_full="refuse_early", max_tokens=0)
    assert chat.failure.code == "context_full" and "64 for the answer" in chat.failure.message
    assert chat.failure.n_tokens > 512 - 64 and not chat.failure.alone
    chat.request(messages=turns[:1], when_full="refuse_early", max_tokens=0)
    assert chat.failure.alone and "The last message needs" in chat.failure.message


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
