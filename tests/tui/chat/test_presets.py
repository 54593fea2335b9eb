"""Tests choosing, saving and deleting presets on the chat screen."""

from __future__ import annotations

from pathlib import Path

from textual.command import CommandPalette

from cpuchat.config import settings
from cpuchat.config.presets import Preset, find_preset, load_presets, save_preset
from cpuchat.config.settings import SamplingSection
from cpuchat.tui.chat.menus import gist
from cpuchat.tui.widgets.dialogs import AskTextScreen, ChoiceScreen, ConfirmScreen
from tests.support.chat_app import RunningApp, running
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer


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
        assert "▸ System prompt of preset warm: Sing. · 1 line (F7)" in app.screen_text

        await pick(app, "preset", "calm")
        await app.until(lambda: app.prompt.border_title == "Message · calm (its model is not loaded)")
        assert "System prompt" not in app.screen_text
        await app.until(lambda: any("none.gguf" in notice for notice in app.notices))  # its model is not here
        await app.send("Second")
        assert backend.requests[-1].sampling.temperature == 0.1

        await app.chat.run_action("save_preset")
        await app.until(lambda: isinstance(app.app.screen, AskTextScreen))
        await app.press(*"calm2", "enter")
        await app.until(lambda: "Preset calm2 saved." in app.notices)
        saved = find_preset("calm2")
        assert saved.options == {"temperature": 0.1} and Path(saved.model) == Path(MODEL.path)
        assert app.prompt.border_title == "Message · calm2"

        app.app.services.save_settings({"chat": {"preset": "warm"}})
        await app.until(lambda: app.conversation.settings.chat.preset == "warm")
        await pick(app, "delete_preset", "warm")
        await app.until(lambda: isinstance(app.app.screen, ConfirmScreen))
        await app.press("y")
        await app.until(lambda: "Preset warm deleted." in app.notices)
        assert list(load_presets()) == ["calm", "calm2"]
        await app.until(lambda: not settings.load().chat.preset)  # else no new chat could begin


def test_what_a_preset_sets_in_short() -> None:
    preset = Preset(name="a", reasoning="off", model="Qwen/Qwen2.5-7B-GGUF", sampling=SamplingSection(top_p=0.9))
    assert gist(preset) == "top p 0.9 · reasoning off · Qwen2.5-7B-GGUF"


async def test_without_presets_it_is_said_how_to_make_one() -> None:
    async with running() as app:
        await app.ready()
        await app.chat.run_action("preset")
        await app.until(lambda: any("There are no presets yet." in notice for notice in app.notices))


async def test_a_chat_reasons_as_was_chosen_for_it_and_answers_now() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One.", reasoning="Let me see.", gate=gate)])
    async with running(backend) as app:
        await app.ready()
        await app.chat.run_action("chat_reasoning")
        await app.until(lambda: isinstance(app.app.screen, ChoiceScreen) and "(now: auto)" in app.screen_text)
        await app.press("right", "right", "enter")
        await app.until(lambda: isinstance(app.app.screen, AskTextScreen))
        await app.press(*"300", "enter")
        await app.until(lambda: app.prompt.border_title == "Message · reasoning on, at most 300 tokens")
        await app.send("First", wait=False)
        await app.until(lambda: "▾ reasoning · 3 words · F10 answers now" in app.screen_text)
        assert (backend.requests[-1].reasoning, backend.requests[-1].reasoning_budget) == (True, 300)
        await app.press("f10")
        await app.until(lambda: backend.reasoning_ended)
        gate.open()
        await app.until(lambda: not app.chat.busy)
        await app.press("f10", "ctrl+n")
        await app.until(lambda: any("The model is not reasoning" in notice for notice in app.notices))
        await app.until(lambda: app.prompt.border_title == "Message")
