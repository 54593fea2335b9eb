"""Tests presets: their file, what they set, and the preset of a chat, with a real store."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from cpuchat.base import paths
from cpuchat.base.errors import SettingsError, UsageError
from cpuchat.chats.store import ChatStore
from cpuchat.chats.transfer import export_chat, import_chats
from cpuchat.cli.options import laid_over, with_preset
from cpuchat.config.presets import Preset, find_preset, load_presets
from cpuchat.config.settings import SamplingSection, Settings
from cpuchat.present.chats import markdown
from cpuchat.session.conversation import Conversation
from cpuchat.session.preset import reasoning_of
from tests.chats.test_branches import everything
from tests.support.presets import write_presets
from tests.support.scripted_backend import ScriptedBackend, answer

pytestmark = pytest.mark.usefixtures("measured_machine")

FILE = """\
# For pull requests
["Code review"]
system_prompt = "Be strict."
model = "demo"
reasoning = "off"
sampling = { temperature = 0.2 }

[story]
sampling = { temperature = 1.2, top_k = 0 } # lively
"""


@contextlib.asynccontextmanager
async def conversation(n_answers: int) -> AsyncIterator[Conversation]:
    backend = ScriptedBackend([answer(f"Answer {number}.") for number in range(n_answers)])
    core = Conversation(settings=Settings(), backend=backend, store=ChatStore(paths.chats_db()))
    core.settings.chat.system_prompt = "Be brief."
    try:
        yield core
    finally:
        await core.close()


def limits(core: Conversation) -> tuple[bool | None, int | None]:
    assert isinstance(core.backend, ScriptedBackend)
    request = core.backend.requests[-1]
    return request.reasoning, request.reasoning_budget


def asked(core: Conversation) -> tuple[str, float, bool | None]:
    """Return system prompt, temperature and reasoning of the last request."""
    assert isinstance(core.backend, ScriptedBackend)
    request = core.backend.requests[-1]
    return request.messages[0].content, request.sampling.temperature, request.reasoning


def test_the_file_is_read() -> None:
    assert load_presets() == {}
    write_presets(FILE)
    review, story = load_presets().values()
    assert (review.name, review.system_prompt, review.model, review.reasoning) == (
        "Code review", "Be strict.", "demo", "off",
    )  # fmt: skip
    assert story.options == {"temperature": 1.2, "top_k": 0} and story.system_prompt is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\ntemperature = 1", "a: object contains unknown field `temperature`"),
        ("[a]\nsampling = { temperature = 11 }", "a.sampling.temperature: expected `float` <= 10"),
        ("a = 1", "a: not a table"),
        ("[a", "is not valid TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(text: str, said: str) -> None:
    write_presets(text)
    with pytest.raises(SettingsError, match=r"presets\.toml") as caught:
        load_presets()
    assert said in caught.value.message


def test_options_of_the_command_line_count_before_the_preset() -> None:
    write_presets(FILE)
    base, model = with_preset("Code review", None, None)
    assert model == "demo" and base is not None and base.chat.system_prompt == "Be strict."
    assert laid_over({"sampling__temperature": 0.9}, base).sampling.temperature == 0.9
    assert with_preset("Code review", "mine.gguf", None)[1] == "mine.gguf"
    assert with_preset("Code review", None, "http://127.0.0.1:1")[1] is None
    assert with_preset("", None, None) == (None, None)
    with pytest.raises(UsageError, match="no preset 'x'") as caught:
        with_preset("x", None, None)
    assert caught.value.hint == "Available: Code review, story."


async def test_a_chat_keeps_the_preset_as_it_was_chosen() -> None:
    write_presets(FILE)
    async with conversation(6) as core:
        await core.preset.choose(find_preset("Code review"))
        await everything(core.send("First?"))
        assert asked(core) == ("Be strict.", 0.2, False)
        used = core.messages[-1].settings
        assert used is not None and (used.preset, used.system_prompt) == ("Code review", "Be strict.")
        assert core.chat is not None
        first = core.chat.id
        write_presets("")  # the chat has it, whatever becomes of the file

        core.new_chat()
        assert core.preset.name == ""
        await everything(core.send("Without?"))
        assert asked(core) == ("Be brief.", 0.7, None)

        await core.open_chat(first)
        await everything(core.send("Second?"))
        assert asked(core) == ("Be strict.", 0.2, False) and core.preset.name == "Code review"
        exported = export_chat(core.history.store, core.history.store.chat(first))
        assert exported.preset is not None and exported.preset.options == {"temperature": 0.2}
        await core.preset.choose(Preset(name="warm", sampling=SamplingSection(temperature=1.5)))
        await everything(core.regenerate())
        assert asked(core) == ("Be brief.", 1.5, None)
        await core.preset.choose(None)
        await everything(core.send("Third?"))
        assert asked(core) == ("Be brief.", 0.7, None)
        await core.delete_chat(first)
        import_chats(core.history.store, [exported])
        assert core.history.store.chat(first).preset == exported.preset


async def test_a_chat_keeps_its_own_system_prompt_beside_a_preset() -> None:
    write_presets(FILE)
    async with conversation(4) as core:
        await everything(core.send("First?"))
        core.settings.chat.system_prompt = "Rhyme."  # of new chats, not of this one
        for preset, prompt in ((Preset(name="without"), "Be brief."), (find_preset("Code review"), "Be strict.")):
            await core.preset.choose(preset)
            await everything(core.send("Next?"))
            assert asked(core)[0] == prompt
        assert core.chat is not None
        exported = export_chat(core.history.store, core.history.store.chat(core.chat.id))
        assert exported.system_prompt == "Be brief." and "Be strict." in markdown(exported)
        await core.preset.choose(None)
        await everything(core.send("Last?"))
        assert asked(core)[0] == "Be brief."


async def test_new_chats_begin_with_the_preset_of_the_settings() -> None:
    write_presets(FILE)
    async with conversation(2) as core:
        core.preset.of_new_chats = lambda: core.settings.chat.preset
        core.settings.chat.preset = "story"
        await everything(core.send("First?"))
        assert asked(core) == ("Be brief.", 1.2, None)
        core.new_chat()
        core.settings.chat.preset = "tale"
        assert core.preset.name == "tale"
        with pytest.raises(UsageError, match="no preset 'tale'") as caught:
            await everything(core.send("Second?"))
        assert caught.value.hint.startswith("Available: Code review, story. Or clear Preset")
        assert core.chat is None
        await core.preset.choose(None)
        await everything(core.send("Second?"))
        assert asked(core) == ("Be brief.", 0.7, None)


async def test_a_chat_reasons_as_was_chosen_for_it() -> None:
    async with conversation(3) as core:
        await core.preset.choose(Preset(name="calm", reasoning="off", reasoning_budget=9))
        await core.preset.set_reasoning(*reasoning_of("50"))
        await everything(core.send("First?"))
        assert limits(core) == (True, 50)
        assert core.chat is not None and core.preset.reasoning == ("on", 50)
        exported = export_chat(core.history.store, core.history.store.chat(core.chat.id))
        assert (exported.reasoning, exported.reasoning_budget) == ("on", 50)
        await core.preset.set_reasoning(*reasoning_of("default"))
        await everything(core.regenerate())
        assert limits(core) == (False, 9)
        await core.preset.set_reasoning(*reasoning_of("on"))
        core.new_chat()
        await everything(core.send("Second?"))
        assert limits(core) == (None, None)
    with pytest.raises(UsageError, match="Not a choice of reasoning: 'much'"):
        reasoning_of("much")
