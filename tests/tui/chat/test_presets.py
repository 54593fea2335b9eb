"""Tests choosing, saving and deleting presets on the chat screen."""

from __future__ import annotations

from pathlib import Path

from textual.command import CommandPalette

from cpuchat.presets import Preset, find_preset, load_presets, save_preset
from cpuchat.settings import SamplingSection
from cpuchat.tui.chat.presets import gist
from cpuchat.tui.widgets.dialogs import AskTextScreen, ConfirmScreen
from tests.support.chat_app import RunningApp, running
from tests.support.scripted_backend import MODEL, ScriptedBackend, answer


async def pick(app: RunningApp, action: str, words: str) -> None:
    """Run an action that lists presets, and choose the one with these words."""
    await app.chat.run_action(action)
    await app.until(lambda: isinstance(app.app.screen, CommandPalette))
    await app.press(*words)
    await app.until(lambda: words in app.screen_text.split("Preset …")[-1])
    await app.press("enter")
    await app.until(lambda: not isinstance(app.app.screen, CommandPalette))


async def test_a_preset_is_chosen_saved_and_deleted() -> None:
    save_preset(Preset(name="warm", system_prompt="Sing.", sampling=SamplingSection(temperature=1.5)))
    save_preset(Preset(name="calm", model="/models/none.gguf", sampling=SamplingSection(temperature=0.1)))
    backend = ScriptedBackend([answer("One."), answer("Two.")])
    async with running(backend) as app:
        await app.ready()
        assert app.prompt.border_title == "Message"
        await pick(app, "preset", "warm")
        await app.until(lambda: app.prompt.border_title == "Message · warm")
        await app.send("First")
        assert backend.requests[-1].sampling.temperature == 1.5
        assert backend.requests[-1].messages[0].content == "Sing."

        await pick(app, "preset", "calm")
        await app.until(lambda: app.prompt.border_title == "Message · calm")
        await app.until(lambda: any("none.gguf" in notice for notice in app.notices))  # its model is not here
        await app.send("Second")
        assert backend.requests[-1].sampling.temperature == 0.1

        await app.chat.run_action("save_preset")
        await app.until(lambda: isinstance(app.app.screen, AskTextScreen))
        await app.press(*"calm2", "enter")
        await app.until(lambda: "Preset calm2 saved." in app.notices)
        saved = find_preset("calm2")
        assert saved.options == {"temperature": 0.1} and Path(saved.model) == Path(MODEL.path)

        await pick(app, "delete_preset", "warm")
        await app.until(lambda: isinstance(app.app.screen, ConfirmScreen))
        await app.press("y")
        await app.until(lambda: "Preset warm deleted." in app.notices)
        assert list(load_presets()) == ["calm", "calm2"]


def test_what_a_preset_sets_in_short() -> None:
    preset = Preset(name="a", reasoning="off", model="Qwen/Qwen2.5-7B-GGUF", sampling=SamplingSection(top_p=0.9))
    assert gist(preset) == "top p 0.9 · reasoning off · Qwen2.5-7B-GGUF"


async def test_without_presets_it_is_said_how_to_make_one() -> None:
    async with running() as app:
        await app.ready()
        await app.chat.run_action("preset")
        await app.until(lambda: any("There are no presets yet." in notice for notice in app.notices))
