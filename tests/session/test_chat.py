"""Tests the session without a screen: its states, its queue and its events, with a real database."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from cpuchat.base import paths
from cpuchat.base.errors import ToolServerFailed
from cpuchat.chats.records import WhenFull
from cpuchat.chats.store import ChatStore
from cpuchat.config.settings import Settings
from cpuchat.protocol.messages import Failed, GenerationFinished, LoadCancelled, ModelLoaded
from cpuchat.session import events
from cpuchat.session.activity import Activity
from cpuchat.session.chat import ChatSession
from cpuchat.session.conversation import Conversation
from cpuchat.session.events import Outgoing, SessionEvent
from tests.support.looking import LOOK, server_config
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer, calling

FILE, OTHER = Path("/models/qwen2.5-1.5b-instruct-q8_0.gguf"), Path("/models/other.gguf")
FULL = Failed(code="context_full", message="The context is full.", hint="")
E = TypeVar("E")


class Heard(list[SessionEvent]):
    """All events of a session, in order."""

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self if isinstance(event, kind)]

    @property
    def notices(self) -> str:
        return "\n".join(event.text for event in self if isinstance(event, events.Notice))


@contextlib.asynccontextmanager
async def session_of(backend: ScriptedBackend, *, load: bool = True) -> AsyncIterator[tuple[ChatSession, Heard]]:
    core = Conversation(settings=Settings(), backend=cast(Any, backend), store=ChatStore(paths.chats_db()))
    session, heard = ChatSession(core), Heard()
    session.source = FILE
    session.listen = heard.append
    try:
        if load:
            session.load(FILE)
            await session.settled()
        yield session, heard
    finally:
        await session.finish()
        await core.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(180):
        while not condition():
            await asyncio.sleep(0)


async def answered(session: ChatSession, *texts: str) -> None:
    """Send messages, each once the one before is answered."""
    for text in texts:
        session.submit(Outgoing(text))
        await session.settled()


def contents(session: ChatSession) -> list[str]:
    return [message.content for message in session.messages]


async def test_a_new_chat_waits_for_the_answer_and_takes_the_messages_after_it() -> None:
    gate = Gate()
    async with session_of(ScriptedBackend([answer("One two", gate=gate), answer("Three."), answer("Four.")])) as (
        session,
        heard,
    ):
        session.submit(Outgoing("Count"))
        await gate.reached.wait()
        session.new()
        assert session.next_begins_chat and contents(session)[0] == "Count"
        session.submit(Outgoing("Other", begins_chat=True))
        session.submit(Outgoing("Then"))
        gate.open()
        await session.settled()
        assert contents(session) == ["Other", "Three.", "Then", "Four."] and not session.next_begins_chat
        assert len(heard.of(events.ChatOpened)) == 1 and len(await session.history.list_chats()) == 2


async def test_the_time_in_which_the_job_was_stopped_counts_for_nothing() -> None:
    gate = Gate()
    async with session_of(ScriptedBackend([answer("One two three", gate=gate)])) as (session, heard):
        session.submit(Outgoing("Count"))
        await gate.reached.wait()
        session.conversation.was_stopped(0.02)
        gate.open()
        await session.settled()
        last = heard.of(events.AnswerEnded)[0].last
        assert isinstance(last, GenerationFinished) and last.timings.predicted_ms == 30.0


async def test_after_a_failed_answer_the_queue_waits_for_the_user() -> None:
    gate = Gate()
    failed = [gate, Failed(code="worker_died", message="Worker crashed.", hint="")]
    backend = ScriptedBackend([failed, answer("Two.")])
    async with session_of(backend) as (session, heard):
        session.submit(Outgoing("Count"))
        await gate.reached.wait()
        session.submit(Outgoing("And then?"))
        gate.open()
        await session.settled()
        assert [message.text for message in session.queue] == ["And then?"] and len(backend.requests) == 1
        assert isinstance(heard.of(events.AnswerEnded)[0].last, Failed)
        await answered(session, "Again")
        assert backend.requests[1].messages[-1].content.endswith("And then?")
        assert [request.messages[-1].content for request in backend.requests[2:]] == ["Again"]


async def test_a_message_that_was_not_stored_is_returned() -> None:
    async with session_of(ScriptedBackend()) as (session, heard):
        await session.conversation.close()  # the database is gone
        message = Outgoing("Hello")
        session.submit(message)
        await session.settled()
        assert [event.message for event in heard.of(events.MessageReturned)] == [message]
        session.requeue(message)
        assert session.take_back_all() == [message]


async def test_a_load_that_is_stopped_goes_on_with_the_next_message_or_the_model_before() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])
    async with session_of(backend, load=False) as (session, heard):
        session.load(FILE)
        await gate.reached.wait()
        session.load(OTHER)
        assert "when the model is loaded" in heard.notices and session.source == FILE
        await session.stop()
        await session.settled()
        assert session.activity is Activity.NONE and not session.loaded
        assert isinstance(heard.of(events.LoadEnded)[-1].last, LoadCancelled)
        assert "Load stopped. Your next message restarts it." in heard.notices
        gate.open()
        await answered(session, "Hello")
        assert contents(session) == ["Hello", "Hello there."]
        backend.load_steps = [other := Gate(), ModelLoaded(model=MODEL)]
        session.load(OTHER)
        await other.reached.wait()
        await session.stop()
        other.open()
        await session.settled()
        assert heard.of(events.LoadBegun)[-1].again
        assert session.loaded and session.source == Path(MODEL.path)


async def test_what_cannot_be_done_while_an_answer_is_written_says_when_it_can() -> None:
    gate = Gate()
    async with session_of(ScriptedBackend([answer("One two", gate=gate)])) as (session, heard):
        session.submit(Outgoing("Count"))
        await gate.reached.wait()
        session.load(OTHER)
        session.regenerate()
        session.continue_answer()
        session.summarize()
        refusals = [event for event in heard.of(events.Notice) if event.refuses]
        assert len(refusals) == 4 and all("when the answer is done" in event.text for event in refusals)
        await session.stop()
        await session.settled()
        assert session.source == FILE and contents(session) == ["Count", "One "]


async def test_without_messages_and_without_a_model_actions_say_so() -> None:
    async with session_of(ScriptedBackend(), load=False) as (session, heard):
        session.continue_answer()
        session.summarize()
        session.regenerate()
        await session.answer_now()
        for said in ("Nothing to continue", session.no_model, "Nothing to regenerate", "not reasoning"):
            assert said in heard.notices
        assert session.activity is Activity.NONE and not session.loaded and session.question_index() == -1


@pytest.mark.parametrize(("choice", "last"), [("drop", "Answered."), ("stop", "Why?"), ("", "Why?")])
async def test_a_full_context_is_asked_about_and_the_choice_is_kept(choice: WhenFull, last: str) -> None:
    backend = ScriptedBackend([answer("One."), [FULL], answer("Answered.")])
    async with session_of(backend) as (session, heard):
        session.conversation.asks_when_full = True
        await answered(session, "Say", "Why?")
        assert session.activity is Activity.AWAITING_ROOM and len(heard.of(events.WhenFullAsked)) == 1
        await session.choose_when_full(choice)
        await session.settled()
        assert session.activity is Activity.NONE and contents(session)[-1] == last
        assert session.conversation.chat is not None and session.conversation.chat.when_full == choice
        assert ("Not answered" in heard.notices) == (choice != "drop")


@pytest.mark.parametrize("choice", ["", "compact"])
async def test_a_question_that_is_too_long_by_itself_is_to_be_edited_and_nothing_is_summarized(
    choice: WhenFull,
) -> None:
    alone = Failed(code="context_full", message="The message is too long.", hint="", alone=True)
    backend = ScriptedBackend([answer("One."), [alone]])
    async with session_of(backend) as (session, heard):
        session.conversation.asks_when_full = True
        await answered(session, "First")
        await session.history.set_options(when_full=choice)
        await answered(session, "word " * 9)
        assert len(heard.of(events.QuestionTooLong)) == 1 and session.activity is Activity.NONE
        assert not heard.of(events.WhenFullAsked) and len(backend.requests) == 2
        assert contents(session) == ["First", "One.", "word " * 9]


async def test_an_approval_waits_for_the_user_and_ends_with_the_answer(tmp_path: Path) -> None:
    backend = ScriptedBackend([calling("", LOOK), answer("Seen."), calling("", LOOK)])
    async with session_of(backend) as (session, heard):
        await session.start_server("eyes", server_config(tmp_path))
        session.submit(Outgoing("Look at it"))
        await until(lambda: session.activity is Activity.AWAITING_APPROVAL)
        assert session.writing
        session.approve("once")
        await session.settled()
        assert contents(session)[-1] == "Seen."
        session.approve("once")  # nothing is asked any more
        session.tell_offered("Other tools.")
        assert f"{session.history.n_past:,} tokens will be re-evaluated" in heard.notices
        session.submit(Outgoing("Again"))
        await until(lambda: session.activity is Activity.AWAITING_APPROVAL)
        await session.stop()
        await session.settled()
        assert session.activity is Activity.NONE
        assert [event.choice for event in heard.of(events.ApprovalEnded)] == ["once", None]


async def test_a_measurement_runs_in_the_place_of_an_answer() -> None:
    async with session_of(ScriptedBackend()) as (session, heard):
        left = asyncio.Event()

        async def work() -> None:
            await left.wait()

        session.measure(work(), left.set)
        session.submit(Outgoing("Hello"))
        await asyncio.sleep(0)
        assert session.activity is Activity.MEASURING and not session.writing
        session.regenerate()
        assert "when the model is loaded" in heard.notices
        left.set()
        await session.settled()
        assert contents(session) == ["Hello", "Hello there."]


async def test_work_for_idle_time_ends_before_an_answer_begins() -> None:
    class Working:
        running = True

        async def stop(self) -> None:
            stopped_at.append(len(backend.requests))
            self.running = False

    backend, stopped_at = ScriptedBackend(), list[int]()
    async with session_of(backend) as (session, _):
        session.background.append(Working())
        assert not session.is_idle
        await answered(session, "Hello")
        assert stopped_at[0] == 0 and session.is_idle


async def test_a_message_after_a_stopped_load_loads_again() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])
    async with session_of(backend, load=False) as (session, _):
        session.load(FILE)
        await gate.reached.wait()
        await session.stop()
        session.submit(Outgoing("Hello"))  # before the load has ended
        gate.open()
        await until(lambda: contents(session) == ["Hello", "Hello there."] and not session.busy)


async def test_no_answer_waits_for_a_calibration_which_begins_again() -> None:
    backend = ScriptedBackend()
    backend.calibrating = gate = Gate()
    async with session_of(backend) as (session, _):
        await gate.reached.wait()
        gate.reached.clear()
        assert not session.busy and not session.is_idle
        await answered(session, "Hello")
        await gate.reached.wait()
        gate.open()
        await until(lambda: session.is_idle)
        gate.reached.clear()
        await answered(session, "And again")
        assert session.is_idle and not gate.reached.is_set()


async def test_a_chat_that_is_opened_during_a_load_for_another_is_not_answered_again() -> None:
    backend, gate = ScriptedBackend(), Gate()
    async with session_of(backend) as (session, _):
        await answered(session, "First")
        first = session.chat_id
        session.new()
        await session.set_options({"engine.ctx": 4096}, "")
        await answered(session, "Second")
        second = session.chat_id
        assert first is not None and second is not None
        await session.open(first)
        backend.load_steps.insert(0, gate)
        session.regenerate()
        await gate.reached.wait()
        await session.open(second)
        gate.open()
        await session.settled()
        await answered(session, "Third")
        assert [one.messages[-1].content for one in backend.requests] == ["First", "Second", "Third"]


async def test_a_fork_is_a_chat_of_its_own() -> None:
    backend = ScriptedBackend([answer(text) for text in ("One.", "Two.", "Three.", "Four.")])
    async with session_of(backend) as (session, heard):
        await session.fork()
        assert "no messages yet" in heard.notices
        await answered(session, "First?", "Second?")
        original, before = session.chat_id, session.messages
        assert original is not None
        await session.fork(before[1].id)
        assert contents(session) == ["First?", "One."] and session.messages[1].timings == before[1].timings
        session.submit(Outgoing("Other?"))
        await session.fork()
        assert "You can fork this chat when the answer is done" in heard.notices
        await session.settled()
        await session.fork()
        assert contents(session) == ["First?", "One.", "Other?", "Three."]
        await session.open(original)
        assert session.messages == before
        titles = [chat.title for chat in await session.history.list_chats()]
        assert sorted(titles) == ["First?", "Fork: First?", "Fork: First?"]


async def test_a_tool_server_ended_before_it_had_started_takes_no_other_one_along(tmp_path: Path) -> None:
    config = server_config(tmp_path)
    async with session_of(ScriptedBackend(), load=False) as (session, _):
        first = asyncio.ensure_future(session.start_server("one", config))
        await asyncio.sleep(0)
        ending = asyncio.ensure_future(session.end_server("one"))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(session.start_server("one", config))
        with pytest.raises(ToolServerFailed):
            await first
        await ending
        assert session.tool_servers == {"one": await second}
