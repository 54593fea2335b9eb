"""Tests what a chat is answered with beside the settings, with a real store."""

from __future__ import annotations

import pytest

from cpuchat.base import paths
from cpuchat.base.errors import UsageError
from cpuchat.chats.store import ChatStore
from cpuchat.chats.transfer import export_chat
from cpuchat.config.settings import Settings
from cpuchat.session.conversation import Conversation
from cpuchat.session.options import reasoning_of
from tests.chats.test_branches import everything
from tests.support.scripted_backend import ScriptedBackend, answer

pytestmark = pytest.mark.usefixtures("measured_machine")


async def test_a_chat_keeps_its_system_prompt_and_how_it_reasons() -> None:
    backend = ScriptedBackend([answer("One."), answer("Two."), answer("Three.")])
    core = Conversation(settings=Settings(), backend=backend, store=ChatStore(paths.chats_db()))
    core.settings.chat.system_prompt = "Be brief."

    def asked() -> tuple[str, bool | None, int | None]:
        request = backend.requests[-1]
        return request.messages[0].content, request.reasoning, request.reasoning_budget

    try:
        await core.options.set_reasoning(*reasoning_of("50"))
        await everything(core.send("First?"))
        core.settings.chat.system_prompt = "Rhyme."  # of new chats, not of this one
        assert asked() == ("Be brief.", True, 50) and core.options.reasoning == ("on", 50)
        assert core.chat is not None
        exported = export_chat(core.history.store, core.history.store.chat(core.chat.id))
        assert (exported.reasoning, exported.reasoning_budget) == ("on", 50)
        await core.options.set_reasoning(*reasoning_of("default"))
        await everything(core.regenerate())
        assert asked() == ("Be brief.", None, None)
        await core.options.set_reasoning(*reasoning_of("on"))
        core.new_chat()
        await everything(core.send("Second?"))
        assert asked() == ("Rhyme.", None, None)
    finally:
        await core.close()
    with pytest.raises(UsageError, match="Not a choice of reasoning: 'much'"):
        reasoning_of("much")
