"""Tests that what belongs to one chat stays with it: figures, drafts, the model's name."""

from __future__ import annotations

import msgspec

from cpuchat.protocol.messages import ModelLoaded
from cpuchat.session.conversation import Conversation
from tests.support.chat_app import SMALL, RunningApp, running
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, timings

SLOWER = msgspec.structs.replace(timings(7), predicted_ms=300.0)


def two_chats(conversation: Conversation) -> None:
    """Store two chats: “About apples”, the older one, and “About pears”."""
    store = conversation.history.store
    for title in ("About apples", "About pears"):
        chat = store.create_chat(MODEL.name, title=title)
        store.add_message(chat.id, "user", f"{title}?")
        told = store.add_message(chat.id, "assistant", "They are fruit.", model=MODEL.name)
        store.update_message(
            told.id, content=told.content, reasoning="", stop_reason="end", timings=SLOWER, model=MODEL.name
        )


async def open_chat(app: RunningApp, title: str) -> None:
    chats = app.conversation.history.store.chats()
    await app.chat.open_chat(next(chat.id for chat in chats if chat.title == title)).wait()
    await app.pilot.pause()


async def test_figures_of_another_chat_are_not_shown() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])
    async with running(backend, prepare=two_chats, size=SMALL) as app:
        await app.until(gate.reached.is_set)
        await open_chat(app, "About pears")  # before the model is loaded
        gate.open()
        await app.ready()
        await app.shows("49/8k")
        await app.press("ctrl+n")
        await app.send("A question")
        assert app.conversation.figures().decode_tok_s.value is not None
        assert "40.0" in app.screen_text
        await open_chat(app, "About apples")
        figures = app.conversation.figures()
        assert figures.decode_tok_s.value is figures.ttft_s.value is None and figures.history == ()
        assert figures.n_past.value == SLOWER.n_past
        assert "40.0" not in app.screen_text
        assert "49/8k" in app.screen_text
        await app.press("ctrl+n")
        assert app.conversation.figures().n_past.value == 0
        assert "0/8k" in app.screen_text
