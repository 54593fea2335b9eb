"""Tests that a text that was not sent stays: through keys, errors, other chats, and the next start of the app."""

from __future__ import annotations

from cpuchat.chats.records import Attachment
from cpuchat.protocol.messages import Failed
from cpuchat.tui.chat.composer import Paths
from tests.support.chat_app import counting, loaded, running
from tests.support.scripted_backend import Gate, ScriptedBackend, answer

LONG = "\n".join(f"line {number}" for number in range(60))


async def test_drafts_of_all_chats_are_there_at_the_next_start() -> None:
    async with loaded() as app:
        await app.send("First")
        first = app.open_chat
        await app.write("after the first")
        await app.press("ctrl+n")
        await app.until(lambda: not app.prompt.text)
        await app.write("of a new chat: ")
        await app.paste(LONG)
    async with loaded() as app:
        assert app.prompt.text == "of a new chat: [Pasted text 1: 60 lines] "
        app.chat.commands.open(first.id)
        await app.until(lambda: app.prompt.text == "after the first")
        await app.press("ctrl+n")
        await app.until(lambda: app.prompt.text.startswith("of a new chat"))
        await app.press("enter")
        await app.until(lambda: app.backend.requests and not app.chat.session.busy)
        assert app.conversation.messages[0].attachments == (
            Attachment(mark="[Pasted text 1: 60 lines]", title="Pasted text 1", text=LONG),
        )
    async with running() as app:
        await app.until(lambda: app.prompt.text == "after the first")  # the other one was sent


async def test_the_chat_with_the_last_draft_is_open_at_the_next_start_unless_a_new_one_has_one() -> None:
    async with loaded() as app:
        for title in ("First", "Second"):
            await app.send(title)
            await app.write(f"after {title}")
            await app.press("ctrl+n")
            await app.until(lambda: not app.prompt.text)
    async with running() as app:
        await app.until(lambda: app.prompt.text == "after Second")
        assert [one.content for one in app.conversation.messages if one.role == "user"] == ["Second"]
        assert any("Opened the chat with your unsent message" in notice for notice in app.notices)
        await app.press("ctrl+n")
        await app.until(lambda: not app.prompt.text)
        await app.write("of a new chat")
    async with loaded() as app:
        assert (app.prompt.text, app.conversation.messages) == ("of a new chat", [])


async def test_an_edit_that_another_chat_interrupts_is_a_draft() -> None:
    async with loaded() as app:
        await app.send("Hello")
        chat = app.open_chat
        await app.press("f4")
        await app.until(lambda: app.prompt.text == "Hello")
        await app.press(*", you", "ctrl+n")
        await app.until(lambda: not app.prompt.text)
        app.chat.commands.open(chat.id)
        await app.until(lambda: app.prompt.text == "Hello, you")
        await app.press("f4")
        await app.until(lambda: app.prompt.text == "Hello")
        await app.press("!")
    async with running() as app:
        await app.until(lambda: app.prompt.text == "Hello, you\nHello!")


async def test_a_draft_that_cannot_be_saved_is_told_once_and_saved_when_it_can_be() -> None:
    async with loaded() as app:
        drafts, db = app.conversation.history.drafts, app.conversation.history.store._db
        db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")  # a full disk
        for _ in range(2):
            await app.write("words " * 2000)
            drafts.save()
        await app.write("!")
        told = [notice for notice in app.notices if "What you type is not saved" in notice]
        assert told == ["What you type is not saved. Cannot save your chats: the disk is full. Free some space."]
        db.execute("PRAGMA max_page_count = 1000000")
        await app.write("?")
        drafts.save()
        assert drafts.problem is None and drafts.take() == {None: ("?", {})}


async def test_a_queued_message_is_a_draft_after_a_kill() -> None:
    async with counting("One two") as (app, gate):
        await app.send("And then?", wait=False)
        await app.write("And")
        app.conversation.history.drafts.save()  # what a kill now leaves
        assert app.conversation.history.drafts.take() == {app.open_chat.id: ("And then?\nAnd", {})}
        gate.open()
        await app.until(lambda: not app.chat.session.busy)


async def test_an_error_and_another_try_leave_what_was_typed_meanwhile() -> None:
    gate = Gate()
    failed = Failed(request_id=0, code="engine", message="No.")
    async with loaded(ScriptedBackend([[gate, failed], answer("Yes")])) as app:
        await app.send("Hello", wait=False)
        await app.until(gate.reached.is_set)
        await app.write("the next question")
        gate.open()
        await app.until(lambda: not app.chat.session.busy)
        await app.press("ctrl+r")
        await app.until(lambda: not app.chat.session.busy)
        assert "the next question" in app.prompt.text


async def test_keys_and_pastes_leave_a_draft_as_it_is() -> None:
    async with loaded() as app:
        await app.send("Explain this")
        await app.send("Thanks")
        await app.write("a long draft")
        for keys in (("up", "down"), ("ctrl+c",), ("escape",), ("f1", "escape"), ("ctrl+p", "escape")):
            await app.press(*keys)
            assert app.prompt.text == "a long draft"
        await app.press("up")  # a sent message that is recalled and changed is kept beside the draft
        assert app.prompt.text == "Thanks"
        await app.press(*" a lot", "up")
        assert app.prompt.text == "Explain this"
        await app.press("down", "down")
        assert app.prompt.text == "a long draft\nThanks a lot"
        app.prompt.clear()
        await app.paste("one\r\ntwo\nthree")  # a few pasted lines stay lines
        assert app.prompt.text.splitlines() == ["one", "two", "three"]
        app.prompt.clear()
        await app.press(*"看@README")  # completions are offered again after a space was taken back
        await app.until(lambda: app.chat.query_one(Paths).marks)
        await app.press("space")
        await app.until(lambda: not app.chat.query_one(Paths).marks)
        await app.press("backspace")
        await app.until(lambda: app.chat.query_one(Paths).marks)
