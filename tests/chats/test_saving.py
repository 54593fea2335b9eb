"""Tests what becomes of messages when the disk is full, the file is locked, or another instance is at the same chat."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from cpuchat.base import paths
from cpuchat.base.errors import ChatsChanged, ChatsError
from cpuchat.protocol.messages import AnyEvent, PrefillProgress, TextDelta
from cpuchat.session.conversation import Conversation
from cpuchat.tui.launch import print_unsaved
from tests.chats.test_branches import conversation, everything
from tests.support.scripted_backend import Gate, answer

pytestmark = pytest.mark.usefixtures("measured_machine")

PREFILL = PrefillProgress(request_id=1, processed=1, total=1, cache_n=0)
LONG = ("word" * 24 + " ") * 1_000  # in few pieces


def stored(chat_id: str) -> list[tuple[str, str]]:
    """Return the messages of all branches as another instance reads them."""
    with contextlib.closing(sqlite3.connect(paths.chats_db())) as db:
        return db.execute("SELECT role, content FROM messages WHERE chat_id = ? ORDER BY id", (chat_id,)).fetchall()


def fill_the_disk(core: Conversation) -> None:
    core.history.store._db.execute("PRAGMA max_page_count = 1")  # SQLite takes the present size: not a page more


@contextlib.asynccontextmanager
async def unsaved(core: Conversation) -> AsyncIterator[asyncio.Event]:
    """Answer with 100 kB that do not fit on the full disk; yields an event that is set when the problem ends."""
    told, over = asyncio.Event(), asyncio.Event()
    core.on_save_problem = lambda: (told if core.history.saver.problem else over).set()
    await everything(core.send("first"))
    async for event in core.send("hello"):
        if isinstance(event, PrefillProgress):
            fill_the_disk(core)
    assert told.is_set()
    yield over


@pytest.mark.slow
async def test_what_a_full_disk_did_not_take_is_saved_when_there_is_room() -> None:
    async with conversation(answer("Hm."), answer(LONG)) as core, unsaved(core) as over:
        assert core.messages[-1].content == LONG
        assert "disk is full" in str(core.history.saver.problem)
        with pytest.raises(ChatsError, match="not saved yet"):
            core.new_chat()
        with pytest.raises(ChatsError, match="not saved yet"):
            await everything(core.send("more"))
        core.history.store._db.execute("PRAGMA max_page_count = 1000000")
        await over.wait()
        assert core.history.saver.problem is None
        assert stored(core.chat.id)[-1] == ("assistant", LONG)
        assert core.messages == core.history.store.messages(core.chat.id)
        await everything(core.regenerate())
        assert core.messages == core.history.store.messages(core.chat.id)


async def test_what_cannot_be_saved_even_at_the_end_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    async with conversation(answer("Hm."), answer(LONG)) as core, unsaved(core):
        await core.close()
        assert print_unsaved(core) == ChatsError.exit_code
        printed = capsys.readouterr()
        assert LONG in printed.out
        assert "could not save" in printed.err


async def test_a_message_that_cannot_be_saved_is_not_sent() -> None:
    async with conversation() as core:
        await everything(core.send("hello"))
        fill_the_disk(core)
        with pytest.raises(ChatsError, match="disk is full"):
            await everything(core.send(LONG))
        assert [m.role for m in core.messages] == ["user", "assistant"]
        assert not core.activity.is_streaming


async def test_the_event_loop_runs_while_another_program_locks_the_file() -> None:
    async with conversation() as core:
        await everything(core.send("hello"))
        with contextlib.closing(sqlite3.connect(paths.chats_db(), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            # Were the loop blocked, the lock would outlast the wait for it.
            asyncio.get_running_loop().call_later(0.2, other.execute, "ROLLBACK")
            await everything(core.send("again"))
        assert [m.role for m in core.messages] == ["user", "assistant"] * 2


@pytest.mark.parametrize("how", ["regenerate", "edit"])
async def test_nothing_is_deleted_before_its_replacement_has_a_word(how: str) -> None:
    gate = Gate()
    async with conversation(answer("The old one."), [PREFILL, gate, *answer("The new one.")]) as core:
        await everything(core.send("hello"))
        before, chat_id = list(core.messages), core.chat.id

        def again() -> AsyncGenerator[AnyEvent, None]:
            return core.regenerate() if how == "regenerate" else core.edit("something else")

        stopped = asyncio.ensure_future(everything(again()))
        await gate.reached.wait()
        assert stored(chat_id) == [("user", "hello"), ("assistant", "The old one.")]
        await core.stop()
        await stopped
        assert core.messages == before == core.history.store.messages(chat_id)

        gate.open()
        await everything(again())
        asked = [] if how == "regenerate" else [("user", "something else")]
        assert stored(chat_id)[2:] == [*asked, ("assistant", "The new one.")]
        assert [m.content for m in core.messages] == [asked[0][1] if asked else "hello", "The new one."]
        assert core.messages == core.history.store.messages(chat_id)


async def test_an_instance_that_is_behind_deletes_nothing_and_catches_up() -> None:
    gate = Gate()
    async with (
        conversation(answer("One."), answer("Two."), [PREFILL, gate, *answer("Three.")]) as one,
        conversation(answer("From the other.")) as other,
    ):
        await everything(one.send("hello"))
        await other.open_chat(one.chat.id)
        await everything(other.send("and?"))
        with pytest.raises(ChatsChanged, match="another window"):
            await everything(one.regenerate())
        assert one.messages == other.messages
        await everything(one.regenerate())
        assert [m.content for m in one.messages] == ["hello", "One.", "and?", "Two."]

        with pytest.raises(ChatsChanged):  # the other is behind now
            await everything(other.send("more"))
        assert other.messages == one.messages
        late = asyncio.ensure_future(everything(one.regenerate()))
        await gate.reached.wait()
        await everything(other.send("more"))  # while the first waits for its first token
        gate.open()
        with pytest.raises(ChatsChanged):
            await late
        assert one.messages == other.messages
        assert [content for _, content in stored(one.chat.id)][-2:] == ["more", "From the other."]


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_another_instance_that_changes_the_chat_of_an_answer_is_noticed(is_deleted: bool) -> None:
    """A deleted answer is not put elsewhere."""
    gate = Gate()
    async with conversation(answer("One two", gate=gate)) as core, conversation() as other:
        with pytest.raises(ChatsChanged, match=None if is_deleted else "during the answer"):
            async for event in core.send("hello"):
                if isinstance(event, TextDelta) and core.chat is not None and event.text == "One ":
                    while len(stored(core.chat.id)) < 2:
                        await asyncio.sleep(0)
                    if is_deleted:
                        await other.delete_chat(core.chat.id)
                    else:
                        other.history.store.add_message(core.chat.id, "user", "me too")
                    gate.open()
        assert not core.activity.is_streaming
        if is_deleted:
            assert other.history.store.chats() == []
        else:
            assert [m.content for m in core.messages] == ["hello", "One two", "me too"]
