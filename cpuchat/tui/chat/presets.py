"""Presets on the chat screen: choose, save and delete, from the command palette."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from textual import work
from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.content import Content

from cpuchat.presets import MAX_NAME, Preset, delete_preset, load_presets, save_preset
from cpuchat.servers import Source, is_url, source
from cpuchat.settings import with_changes
from cpuchat.text import clean_line
from cpuchat.tui.chat.compacting import CompactingScreen
from cpuchat.tui.commands import highlighted, line
from cpuchat.tui.threads import run_in_daemon_thread
from cpuchat.tui.widgets.dialogs import AskTextScreen, ConfirmScreen

_NONE = "No preset"
_WIDEST = 36  # of what a preset sets, in cells


class PresetsScreen(CompactingScreen):
    """Base of the chat screen, which defines what only raises here: the metaclass of Textual leaves no room for ABC."""

    def _show_prompt_title(self) -> None:
        raise NotImplementedError

    @work(exclusive=True, group="preset")
    async def action_preset(self) -> None:
        """Choose the preset of the open chat, or of the next one."""
        if self.refuse_while_writing("choose a preset") or (presets := await self._presets()) is None:
            return
        found: list[Preset | None] = [*presets.values()]
        if self.conversation.preset.name:
            found.append(None)
        if found:
            self._pick(found, "Preset …", self._choose)
        else:
            self.tell("There are no presets yet. Ctrl+P, Save as a preset makes one of the current settings.")

    @work(exclusive=True, group="preset")
    async def action_save_preset(self) -> None:
        """Save system prompt, sampling, reasoning and model of the chat under a name."""
        conversation = self.conversation
        if self.refuse_while_writing("save a preset") or (presets := await self._presets()) is None:
            return
        asking = AskTextScreen("Save as a preset", conversation.preset.name, MAX_NAME)
        if not (name := await self.app.push_screen_wait(asking)):
            return
        question = f"Replace the preset {clean_line(name)}?"
        if name in presets and not await self.app.push_screen_wait(
            ConfirmScreen("Preset", question, "Replace", "Keep")
        ):
            return
        model = conversation.model.path if conversation.model is not None else ""
        with self._telling():
            await conversation.preset.find()
            chosen = conversation.chosen
            if (chat := conversation.chat) is not None:
                chosen = with_changes(chosen, {"chat": {"system_prompt": chat.system_prompt}})
            preset = Preset.of(name, chosen, model)
            await asyncio.to_thread(save_preset, preset)
            await conversation.preset.choose(preset, conversation.settings)
            self.tell(f"Preset {clean_line(name)} saved.")
        self._show_prompt_title()

    @work(exclusive=True, group="preset")
    async def action_delete_preset(self) -> None:
        if presets := await self._presets():
            self._pick([*presets.values()], "Delete the preset …", self._delete_preset)
        elif presets is not None:
            self.tell("There are no presets.")

    async def _presets(self) -> dict[str, Preset] | None:
        """Return the presets; None, and the reason is shown, if they cannot be read."""
        with self._telling():
            return await asyncio.to_thread(load_presets)
        return None

    def _pick(self, presets: list[Preset | None], placeholder: str, use: Callable[[Preset | None], object]) -> None:
        self.app.push_screen(CommandPalette(providers=[_provider(presets, use)], placeholder=placeholder))

    @work(exclusive=True, group="preset")
    async def _choose(self, preset: Preset | None) -> None:
        """Use a preset from the next answer on; its model is loaded."""
        with self._telling():
            await self.conversation.preset.choose(preset, self.services.settings)
            name = clean_line(preset.name) if preset is not None else "none"
            self.tell(f"Preset from the next answer: {name}.")
            if preset is not None and preset.model:
                model = await run_in_daemon_thread(partial(self._model, preset.model))
                if model != self.services.loaded:
                    self.load_model(model)
        self._show_prompt_title()

    def _model(self, name: str) -> Source:
        return source(name) if is_url(name) else self.services.library.resolve(name)

    @work(exclusive=True, group="preset")
    async def _delete_preset(self, preset: Preset | None) -> None:
        assert preset is not None
        name = clean_line(preset.name)
        question = f"Delete the preset {name}? Chats that have it keep it."
        if await self.app.push_screen_wait(ConfirmScreen("Preset", question, "Delete", "Keep")):
            with self._telling():
                await asyncio.to_thread(delete_preset, preset.name)
                self.tell(f"Preset {name} deleted.")


def gist(preset: Preset) -> str:
    """Return what a preset sets, in short: `temperature 0.2 · reasoning off · Qwen3-8B-Q4_K_M`."""
    options = [f"{name.replace('_', ' ')} {value:g}" for name, value in preset.options.items()]
    reasoning = [f"reasoning {preset.reasoning}"] if preset.reasoning in ("on", "off") else []
    model = [preset.model.rpartition("/")[2].removesuffix(".gguf")] if preset.model else []
    return clean_line(" · ".join((*options, *reasoning, *model)))


def _provider(presets: list[Preset | None], use: Callable[[Preset | None], object]) -> type[Provider]:
    class PresetProvider(Provider):
        async def discover(self) -> Hits:
            for preset in presets:
                title = _title(preset)
                yield DiscoveryHit(self._line(preset, Content(title)), partial(use, preset), text=title)

        async def search(self, query: str) -> Hits:
            matcher = self.matcher(query)
            for preset in presets:
                title = _title(preset)
                if (score := matcher.match(title)) > 0:
                    yield Hit(score, self._line(preset, highlighted(matcher, title)), partial(use, preset), text=title)

        def _line(self, preset: Preset | None, title: Content) -> Content:
            about = gist(preset) if preset is not None else ""
            return line(self.app, "", title, about if len(about) <= _WIDEST else f"{about[: _WIDEST - 1]}…")

    return PresetProvider


def _title(preset: Preset | None) -> str:
    return clean_line(preset.name) if preset is not None else _NONE
