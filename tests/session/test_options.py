"""Tests what a chat is answered with beside the settings, with a real store."""

from __future__ import annotations

import pytest
from msgspec.structs import asdict

from cpuchat.base import paths
from cpuchat.chats.records import Chat, repaired_chat
from cpuchat.chats.store import ChatStore
from cpuchat.chats.transfer import export_chat
from cpuchat.config.settings import Settings
from cpuchat.session.conversation import Conversation
from tests.chats.test_branches import everything
from tests.support.chatting import in_use
from tests.support.scripted_backend import ScriptedBackend, answer

pytestmark = pytest.mark.usefixtures("measured_machine")


async def test_a_chat_keeps_its_system_prompt_and_values_of_its_own() -> None:
    backend = ScriptedBackend([answer("One."), answer("Two."), answer("Three.")])
    async with in_use(Conversation(settings=Settings(), backend=backend, store=ChatStore(paths.chats_db()))) as core:
        core.settings.chat.system_prompt = "Be brief."

        def asked() -> tuple[str, bool | None, int | None]:
            request = backend.requests[-1]
            return request.messages[0].content, request.reasoning, request.reasoning_budget

        await core.options.set(own={"chat.reasoning": "on", "chat.reasoning_budget": 50})
        await everything(core.send("First?"))
        core.settings.chat.system_prompt = "Rhyme."  # of new chats, not of this one
        assert asked() == ("Be brief.", True, 50)
        exported = export_chat(core.history.store, core.history.store.chat(core.chat.id))
        assert exported.own == {"chat.reasoning": "on", "chat.reasoning_budget": 50}
        damaged = dict(exported.own) | {"chat.reasoning_budget": -1, "sampling.later": 1, "engine.ctx": 5}
        assert Chat(**repaired_chat(asdict(exported) | {"own": damaged})).own == {"chat.reasoning": "on"}
        await core.options.set(own={})
        await everything(core.regenerate())
        assert asked() == ("Be brief.", None, None)
        await core.options.set(own={"chat.reasoning": "on"})
        core.new_chat()
        await everything(core.send("Second?"))
        assert asked() == ("Rhyme.", None, None)
