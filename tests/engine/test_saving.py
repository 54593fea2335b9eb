"""Tests when the KV of a chat is written to disk: seldom, never in a message's way, and not more than is allowed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import msgspec
import pytest

from cpuchat.engine.states.files import DiskWriter, WriteBudget
from cpuchat.protocol.messages import Event, Generate, Message, PrefillProgress, TextDelta
from tests.engine.conftest import OPTIONS
from tests.engine.prompt.test_fill_in import Clock
from tests.support.engine_chat import LONG, Chat, assistant, user

HOUR = 3600.0
WIDE = msgspec.structs.replace(OPTIONS, n_ctx=2048)


class SavingChat(Chat):
    """A chat whose KV is saved in `folder`; `written` counts the bytes that get there."""

    def __init__(self, model: Path, folder: Path, budget: WriteBudget | None = None) -> None:
        super().__init__(budget)
        self.folder = folder
        self.written = 0
        self._known: set[tuple[str, int, int]] = set()
        self.load(model, WIDE, state_dir=folder)

    def settle(self) -> list[Path]:
        """Return the files once everything is written."""
        super().settle()
        files = sorted(self.folder.iterdir())
        for file in files:
            info = file.stat()
            if (key := (file.name, info.st_ino, info.st_mtime_ns)) not in self._known:  # each is written anew
                self._known.add(key)
                self.written += info.st_size
        return files


@pytest.fixture
def saving(tiny_model: Path, tmp_path: Path) -> Iterator[SavingChat]:
    chat = SavingChat(tiny_model, tmp_path / "kv")
    yield chat
    chat.engine.close()


def test_a_long_rest_saves_once(saving: SavingChat) -> None:
    saving.engine.idle()
    assert saving.settle() == []
    saving.ask(user(LONG), chat_id="a")
    assert saving.settle() == []
    saving.engine.idle()
    files = saving.settle()
    assert [file.suffix for file in files] == [".kv"]
    written = saving.written
    saving.engine.idle()
    assert saving.settle() == files
    saving.ask(user("What has no name cannot be deleted by it. " * 3))
    saving.engine.idle()
    assert saving.settle() == files and saving.written == written
    asked = user("But a program may go on with it. " * 3)
    saving.ask(asked, owner="a client", keeps=True)
    saving.engine.idle()
    assert saving.settle() == files, "until it does"
    saving.ask(asked, assistant(saving.text), user("And then?"), owner="a client", keeps=True)
    saving.engine.idle()
    assert len(saving.settle()) == 2


def test_nothing_is_written_while_a_message_is_answered(saving: SavingChat) -> None:
    """Leaving a chat saves it, and the answer in the next chat does not wait for that."""
    saving.ask(user(LONG), chat_id="one")
    seen: list[int] = []
    kinds = (PrefillProgress, TextDelta)

    def look(event: Event) -> None:
        if isinstance(event, kinds):
            seen.append(sum(file.stat().st_size for file in saving.folder.iterdir()))

    saving.react = look
    saving.ask(user("Something else entirely " * 5), chat_id="two")
    assert len(seen) > 2 and set(seen) == {0}
    assert len(saving.settle()) == 1


def test_a_growing_chat_is_not_written_again_with_every_answer(saving: SavingChat, tiny_model: Path) -> None:
    """However often it rests, and it is all there after the end."""
    turns: list[Message] = []
    n_past = 0
    for number in range(20):
        turns.append(user(f"{number}: and then, what came after that?"))
        n_past = saving.ask(*turns, chat_id="a", max_tokens=30).n_past
        turns.append(assistant(saving.text))
        saving.engine.idle()
        saving.settle()
    state = saving.loaded.model.sequence.state_size()
    assert n_past > 1000
    assert saving.written < 5 * state  # written every time it would be ten
    saving.engine.close()
    again = SavingChat(tiny_model, saving.folder)
    assert again.ask(*turns, user("So?"), chat_id="a").cache_n >= n_past - 1
    again.engine.close()


def test_an_hour_of_changing_chats_stays_within_what_may_be_written(tiny_model: Path, tmp_path: Path) -> None:
    clock = Clock()
    per_hour = 1 << 19
    chat = SavingChat(tiny_model, tmp_path / "kv", WriteBudget(per_hour, clock))
    largest = 0
    for number in range(60):
        chat.ask(user(f"{number} {LONG}"), chat_id=f"chat {number}", max_tokens=4)
        largest = max(largest, chat.loaded.model.sequence.state_size())
        chat.settle()
        clock.now += HOUR / 60
    assert 60 * largest > 3 * per_hour  # there was more to be written
    assert per_hour < chat.written < 2 * per_hour + 2 * largest
    before = chat.written
    chat.engine.close()  # what was said last is saved whatever was written before
    chat.settle()
    assert chat.written > before
    again = SavingChat(tiny_model, chat.folder)
    assert again.ask(user(f"59 {LONG}"), chat_id="chat 59").cache_n > 60
    again.engine.close()


def test_the_budget() -> None:
    clock = Clock()
    budget = WriteBudget(1000, clock)
    assert budget.allows()
    budget.spend(3000)  # the last one may be larger than what is left
    assert not budget.allows()
    clock.now = 1.9 * HOUR
    assert not budget.allows()
    clock.now = 2.1 * HOUR
    assert budget.allows()
    clock.now = 1e6 * HOUR  # nothing is saved up for longer than an hour
    budget.spend(1001)
    assert not budget.allows()


def test_the_writer_waits_while_the_engine_computes() -> None:
    writer, done = DiskWriter(), threading.Event()
    slices: list[int] = []

    def job() -> None:
        for number in range(3):
            writer.wait_until_idle()
            slices.append(number)
            if number == 0:
                writer.pause()
                done.set()

    writer.start(job)
    done.wait()
    writer.finish(lambda: True)  # gives up after one look
    assert not slices[1:] or len(slices) == 3
    writer.resume()
    writer.finish()
    assert slices == [0, 1, 2] and not writer.is_busy

    def broken() -> None:
        raise OSError("no such disk")

    writer.start(broken)
    writer.finish()
    assert not writer.is_busy
    writer.close()


def test_a_stop_while_a_chat_is_read_keeps_what_is_saved(saving: SavingChat) -> None:
    one = saving.ask(user(LONG), chat_id="one")
    turns = (user(LONG), assistant(saving.text), user("And then?"))
    saving.ask(user("Something else"), chat_id="two")
    saving.settle()
    saving.engine.cancel()
    assert saving.ask(*turns, chat_id="one").predicted_n == 0
    saving.engine.clear_cancel()
    assert saving.stop_reason == "cancelled"
    saving.ask(user("Something else"), chat_id="two")
    assert saving.ask(*turns, chat_id="one").cache_n == one.n_past


def test_the_wait_before_an_answer_counts(saving: SavingChat) -> None:
    """TTFT begins when the request reached the process, not when its turn came."""
    saving.events.clear()
    asked = Generate(request_id=1, messages=(user("Hello"),), max_tokens=2)
    saving.engine.generate(asked, arrived=perf_counter() - 100.0)
    assert saving.events[-1].timings.ttft_ms > 100_000  # type: ignore[attr-defined]
    assert saving.of(TextDelta)[0].at_ms > 100_000
