"""Tests branches of chats: in files and through a conversation."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from cpuchat.base import paths
from cpuchat.base.errors import ChatsChanged, UsageError
from cpuchat.chats.records import AnswerSettings, Tree
from cpuchat.chats.store import ChatStore
from cpuchat.config.settings import Settings
from cpuchat.protocol.messages import AnyEvent, Sampling, Speculation
from cpuchat.protocol.timings import Timings
from cpuchat.session.conversation import Conversation
from tests.chats.test_repair import SECRET, leftovers
from tests.support.chatting import in_use
from tests.support.scripted_backend import ScriptedBackend, Step, answer

pytestmark = pytest.mark.usefixtures("measured_machine")


@contextlib.asynccontextmanager
async def conversation(*answers: list[Step] | str) -> AsyncIterator[Conversation]:
    backend = ScriptedBackend([answer(one) if isinstance(one, str) else one for one in answers])
    async with in_use(Conversation(settings=Settings(), backend=backend, store=ChatStore(paths.chats_db()))) as core:
        yield core


async def everything(stream: AsyncGenerator[AnyEvent, None]) -> list[AnyEvent]:
    return [event async for event in stream]


def texts(core: Conversation) -> list[str]:
    """Return the open branch, which is the same in memory and in the store."""
    assert core.messages == core.history.store.messages(core.chat.id)
    return [message.content for message in core.messages]


async def undone(core: Conversation) -> bool:
    """Put back what was deleted last, and open it; return whether there was anything."""
    if deleted := await core.history.undo_delete():
        await core.open_chat(deleted.chat_id, deleted.message_id)
    return deleted is not None


def asked(core: Conversation) -> list[str]:
    """Return what the model was asked last."""
    return [message.content for message in core.backend.requests[-1].messages]


# --- files ---


def test_the_branch_that_was_open_is_open_again(tmp_path: Path) -> None:
    with closing(ChatStore(tmp_path / "chats.db")) as store:
        chat = store.create_chat("m")
        question = store.add_message(chat.id, "user", "q")
        settings = AnswerSettings(
            sampling=Sampling(temperature=0, seed=(1 << 63) - 1), max_tokens=9, path="/m/x.gguf", draft="Small",
            speculation=Speculation(drafters=("draft", "suffix"), depth=4),
        )  # fmt: skip
        first = store.add_message(chat.id, "assistant", "1", settings=settings)
        store.add_message(chat.id, "assistant", "2", after=question.id)
        store.set_options(chat.id, {"leaf": first.id})
    with closing(ChatStore(tmp_path / "chats.db")) as store:
        assert store.messages(chat.id)[1].settings == settings
        assert [m.content for m in store.messages(chat.id)] == ["q", "1"]
        store.add_message(chat.id, "user", "more")
        assert [m.content for m in store.messages(chat.id)] == ["q", "1", "more"]
        with pytest.raises(ChatsChanged, match="no longer exists"):
            store.add_message(chat.id, "user", "after nothing", after=99)


@pytest.mark.parametrize("what", ["chat", "branch"])
def test_what_was_deleted_can_be_put_back_and_is_in_no_file_before(tmp_path: Path, what: str) -> None:
    path = tmp_path / "only" / "chats.db"
    with closing(ChatStore(path)) as store:
        chat = store.create_chat("m", "Be brief.", title=SECRET if what == "chat" else "T")
        question = store.add_message(chat.id, "user", "q")
        told = store.add_message(
            chat.id, "assistant", SECRET * 30, reasoning=SECRET, stop_reason="end", timings=Timings(predicted_n=3)
        )
        store.add_message(chat.id, "user", f"{SECRET}?")
        store.add_message(chat.id, "assistant", "Another.", after=question.id, stop_reason="end")
        before, tree = store.chat(chat.id), store.tree(chat.id)
        deleted = store.delete(chat.id) if what == "chat" else store.delete_branch(store.chat(chat.id), told.id)
        assert leftovers(path) == [] and store.search(SECRET[:6]) == []
        store.add_message(store.create_chat("m", title="Later").id, "user", "x")
        store.undelete(deleted)
        store.undelete(deleted)  # twice is once
        (hit,) = store.search(SECRET)
        assert hit.excerpts[0].message_id == told.id
        assert store.tree(chat.id).subtree(question.id) == tree.subtree(question.id)
        assert [m.content for m in store.messages(chat.id)] == ["q", "Another."]
        assert store.chat(chat.id).updated == before.updated or what == "branch"


# --- a conversation ---


async def test_an_answer_and_what_it_was_before_are_both_there() -> None:
    async with conversation("One.", "More one.", "Two.", "More two.") as core:
        await everything(core.send("First?"))
        await everything(core.send("Second?"))
        question, one = core.messages[:2]
        core.settings.sampling.temperature = 0.0
        await everything(core.regenerate(one.id))
        assert texts(core) == ["First?", "Two."] and asked(core) == ["First?"]
        two = core.messages[1]
        assert core.history.tree.siblings(two.id) == [one.id, two.id]
        await everything(core.send("Third?"))
        assert texts(core) == ["First?", "Two.", "Third?", "More two."]

        await core.open_chat(core.chat.id, one.id)
        assert texts(core) == ["First?", "One.", "Second?", "More one."]
        assert core.messages[:2] == [question, one] and one.sampling and one.sampling.temperature > 0
        known = core.messages[-1].timings.n_past  # type: ignore[union-attr]
        assert core.figures().n_past.value == known
        cut_off = [replace(one, timings=None, content="word " * 70) for one in core.messages[-2:]]  # by a crash
        core.history.messages = [*core.messages, *cut_off]
        assert core.history.n_past == known + 200
        await core.open_chat(core.chat.id, two.id)
        assert texts(core)[-1] == "More two."
        assert two.sampling and two.sampling.temperature == 0
        assert two.settings and two.settings.max_tokens == core.settings.chat.max_tokens


async def test_an_edited_question_is_a_branch_of_its_own() -> None:
    async with conversation("One.", "Two.", "Three.", "Four.") as core:
        await everything(core.send("First?"))
        await everything(core.send("Second?"))
        first, _, second, _ = core.messages
        await everything(core.edit("Second!", second.id))
        assert texts(core) == ["First?", "One.", "Second!", "Three."]
        assert asked(core) == ["First?", "One.", "Second!"]
        await everything(core.edit("Another first?", first.id))
        assert texts(core) == ["Another first?", "Four."]
        assert len(core.history.tree.siblings(core.messages[0].id)) == 2
        with pytest.raises(UsageError, match="no message to answer"):
            await everything(core.edit("x", second.id))  # not on this branch


async def test_deleting_a_branch_opens_the_one_beside_it_and_can_be_undone() -> None:
    async with conversation("One.", "Two.", "Three.", "Four.") as core:
        await everything(core.send("First?"))
        await everything(core.regenerate())
        await everything(core.send("More?"))
        chat_id, two, three = core.chat.id, core.messages[1].id, core.messages[3].id
        await everything(core.regenerate())
        await core.open_chat(chat_id, three)  # and not the newest
        await core.delete_message(two)
        assert texts(core) == ["First?", "One."]
        assert isinstance(core.backend, ScriptedBackend) and core.backend.forgotten == [chat_id]
        await core.delete_message(core.messages[1].id)
        assert texts(core) == ["First?"]
        await core.delete_message(core.messages[0].id)
        assert core.chat is None and core.history.store.chats() == []

        assert await undone(core) and texts(core) == ["First?"]
        assert await undone(core) and texts(core) == ["First?", "One."]
        assert await undone(core) and texts(core) == ["First?", "Two.", "More?", "Three."]
        assert not await undone(core)


async def test_a_deletion_in_a_chat_that_another_window_has_changed_is_refused() -> None:
    async with conversation("One.", "Two.") as core:
        await everything(core.send("First?"))
        chat_id, (question, told) = core.chat.id, core.messages
        with closing(ChatStore(paths.chats_db())) as other:
            other.add_message(chat_id, "user", "Another beginning?", after=0)
            with pytest.raises(ChatsChanged, match="another window"):
                await core.delete_message(question.id)
            assert texts(core) == ["Another beginning?"]
            await core.delete_message(core.messages[0].id)
            assert core.messages == [question, told]
            other.add_message(chat_id, "user", "More?", after=told.id)
            with pytest.raises(ChatsChanged, match="another window"):
                await core.delete_message(told.id)
            assert texts(core) == ["First?", "One.", "More?"]


# --- the tree ---


def test_the_newest_message_ends_the_open_branch_unless_another_does() -> None:
    rows = [(1, 0), (2, 1), (3, 2), (4, 1), (5, 4)]
    tree = Tree(rows)
    assert (tree.leaf, tree.path(tree.leaf)) == (5, [1, 4, 5])
    assert Tree(rows, leaf=3).path(3) == [1, 2, 3]
    assert Tree(rows, leaf=99).leaf == 5 and Tree().leaf == 0
    assert tree.siblings(4) == [2, 4] and tree.siblings(5) == [5]
    assert tree.subtree(1) == [1, 2, 3, 4, 5] and tree.subtree(2) == [2, 3]
    assert tree.after_deletion(2) == 5 and tree.after_deletion(4) == 3
    assert tree.after_deletion(5) == 4 and tree.after_deletion(1) == 0


@pytest.mark.parametrize("parent", [None, "x", 1.5, -1, 3, 99, b"\xff"])
def test_a_message_without_a_sound_parent_follows_the_one_before(parent: object) -> None:
    tree = Tree([(1, 0), (2, 1), (3, parent), (7, 5), (8, 5)])
    assert tree.path(3) == [1, 2, 3]
    assert tree.siblings(7) == [7, 8]  # what both followed is lost; they are still two answers to it
    assert tree.path(7) == [1, 2, 3, 7]
