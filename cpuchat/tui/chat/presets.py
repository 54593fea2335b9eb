"""Presets and the reasoning of a chat on the chat screen: from the command palette."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from textual import work

from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.chat_preset import reasoning_of
from cpuchat.chats.records import StoredMessage
from cpuchat.chats.saving import UNSAVED
from cpuchat.config.presets import MAX_NAME, Preset, delete_preset, load_presets, save_preset
from cpuchat.config.servers import Source, is_url, source
from cpuchat.config.settings import with_changes
from cpuchat.present.answers import reasoning
from cpuchat.telemetry.units import plural, time_left
from cpuchat.tui.chat.compacting import CompactingScreen
from cpuchat.tui.commands import Palette, Row, listing
from cpuchat.tui.widgets.dialogs import AskTextScreen, Choice, ChoiceScreen, ConfirmScreen

_NONE = "No preset"
_REASONING = (Choice("on", "On"), Choice("off", "Off"), Choice("limit", "Limit…"), Choice("default", "Default"))
_WIDEST = 36  # of what a preset sets, in cells


class PresetsScreen(CompactingScreen):
    """Base of the chat screen, which defines what only raises here: the metaclass of Textual leaves no room for ABC."""

    def __init__(self) -> None:
        super().__init__()
        self._models: dict[str, Source | None] = {}  # that presets name; None: not here

    def _show_prompt_title(self) -> None:
        raise NotImplementedError

    def edit_in_prompt(self, message: StoredMessage, kind: str) -> None:
        """Edit a message, or what else the composer `edits`, in the prompt."""
        raise NotImplementedError

    def chat_options(self) -> str:
        """Return what the chat has beside the settings: `review (its model is not loaded) · reasoning off`."""
        preset, loaded = self.conversation.preset, self.services.loaded
        name = preset.name
        if preset.current is not None and (model := preset.current.model) and loaded is not None:
            if model not in self._models:
                self._find_model(model)
            elif self._models[model] not in (loaded, self._stream.path):
                name = f"{name} (its model is not loaded)"
        own = "own system prompt" if preset.has_next_system_prompt else ""  # later it is in the transcript
        return " · ".join(filter(None, (name, own, reasoning(*preset.reasoning))))

    @work(exclusive=True, group="preset-model")
    async def _find_model(self, name: str) -> None:
        """Find the model that a preset names, to compare it with the loaded one."""
        found: Source | None = None
        with contextlib.suppress(CpuchatError):
            found = await run_in_daemon_thread(partial(self._model, name))
        self._models[name] = found
        self._show_prompt_title()

    @work(exclusive=True, group="preset")
    async def action_preset(self, name: str = "") -> None:
        """Use a preset in the open chat, or in the next one: the named one, "none" for none; "" asks which."""
        if self.refuse_while_writing("choose a preset") or (presets := await self._presets()) is None:
            return
        if name in presets or name == "none":
            self._choose(presets.get(name))
            return
        if name:
            self.refuse(f"No preset named {clean_line(name)}. /preset lists them.")
            return
        found: list[Preset | None] = [*presets.values()]
        if self.conversation.preset.name:
            found.append(None)
        if found:
            self._pick(found, "Preset …", self._choose)
        else:
            self.tell("There are no presets yet. Save the current settings as one: Ctrl+P, Save as a preset.")

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
        with self._telling():
            await conversation.preset.find()
            chosen = conversation.chosen
            if (chat := conversation.chat) is not None:
                chosen = with_changes(chosen, {"chat": {"system_prompt": chat.effective_system_prompt}})
            preset = Preset.of(name, chosen, await run_in_daemon_thread(self._model_name))
            self._models[preset.model] = self.services.loaded
            await asyncio.to_thread(save_preset, preset)
            await conversation.preset.choose(preset)
            self.tell(f"Preset {clean_line(name)} saved.")
        self._show_prompt_title()

    @work(exclusive=True, group="preset")
    async def action_delete_preset(self) -> None:
        if presets := await self._presets():
            self._pick([*presets.values()], "Delete the preset …", self._delete_preset)
        elif presets is not None:
            self.tell("There are no presets.")

    @work(exclusive=True, group="preset")
    async def action_chat_reasoning(self, choice: str = "") -> None:
        """Set whether the model reasons in the open chat, or in the next one, and for how many tokens; "" asks."""
        if self.refuse_while_writing("choose the reasoning"):
            return
        preset = self.conversation.preset
        chosen = choice or await self._ask_reasoning()
        if chosen is not None:
            try:
                await preset.set_reasoning(*reasoning_of(chosen))
            except CpuchatError as error:
                self.refuse(str(error), "error")
            self._show_prompt_title()

    async def _ask_reasoning(self) -> str | None:
        """Return what `reasoning_of` reads; None: it was not answered."""
        used = self.conversation.chosen.chat
        now = reasoning(used.reasoning, used.reasoning_budget or None).removeprefix("reasoning ")
        question = f"Reasoning in this chat (now: {now})"
        choice = await self.app.push_screen_wait(ChoiceScreen("Reasoning", question, _REASONING))
        if choice == "limit":
            budget = str(self.conversation.preset.reasoning[1] or "")
            choice = await self.app.push_screen_wait(AskTextScreen("Most tokens of reasoning (0: no limit)", budget, 8))
        return choice

    async def action_answer_now(self) -> None:
        """End the reasoning of the running answer, so that the model answers now."""
        newest = self.conversation.messages[-1:]
        is_answering = any(message.role == "assistant" and message.content for message in newest)
        if is_answering or not self._stream.writing:
            self.tell("The model is not reasoning.")
        elif not await self.conversation.end_reasoning():
            self.tell("The model is not reasoning yet, or its server cannot interrupt it. Esc stops the answer.")

    async def _presets(self) -> dict[str, Preset] | None:
        """Return the presets; None, and the reason is shown, if they cannot be read."""
        with self._telling():
            return await asyncio.to_thread(load_presets)
        return None

    def _pick(self, presets: list[Preset | None], placeholder: str, use: Callable[[Preset | None], object]) -> None:
        rows = listing([_row(preset, use) for preset in presets])
        self.app.push_screen(Palette(providers=[rows], placeholder=placeholder))

    @work(exclusive=True, group="preset")
    async def _choose(self, preset: Preset | None) -> None:
        """Use a preset from the next answer on; its model is loaded."""
        before = self._system_prompt
        with self._telling():
            await self.conversation.preset.choose(preset)
            if self._system_prompt != before:
                self.show_branch(0)  # with the other one
            name = clean_line(preset.name) if preset is not None else ""
            self.tell(f"Preset from the next answer on: {name}." if name else "No preset from the next answer on.")
            if preset is not None and preset.model:
                model = await run_in_daemon_thread(partial(self._model, preset.model))
                self._models[preset.model] = model
                if model != self.services.loaded:
                    self.load_model(model)
        self._show_prompt_title()

    @work(exclusive=True, group="preset")
    async def action_system_prompt(self, text: str = "") -> None:
        """Edit the system prompt of the open chat, or of the next one, in the prompt; or set it to `text`."""
        if self.refuse_while_writing("edit the system prompt"):
            return
        with self._telling():
            await self.conversation.preset.find()
            if text:
                self.save_system_prompt(text)
            else:
                row = StoredMessage(id=UNSAVED, chat_id="", parent=0, role="system", content=self._system_prompt)
                self.edit_in_prompt(row, "system prompt")

    @work(exclusive=True, group="preset")
    async def save_system_prompt(self, text: str) -> None:
        """Set the system prompt from the next answer on, and say what the change costs."""
        if text == self._system_prompt:
            return
        with self._telling():
            await self.conversation.preset.set_system_prompt(text)
            said = "System prompt set for this chat." if text else "This chat has no system prompt now."
            if n_past := self.conversation.history.n_past:
                seconds = self.conversation.meter.prefill_s(n_past)
                wait = f", ≈{time_left(seconds).removesuffix(' left')}" if seconds is not None and seconds >= 1 else ""
                said = f"{said} The next answer reads the whole chat again: {plural(n_past, 'token')}{wait}."
            self.tell(said)
            self.show_branch(0)

    @property
    def _system_prompt(self) -> str:
        chat = self.conversation.chat
        chosen = self.conversation.chosen.chat
        return chat.effective_system_prompt if chat is not None else chosen.system_prompt

    def _model_name(self) -> str:
        """Return the loaded model as a preset names it."""
        path = self.services.loaded_path
        model = self.conversation.model
        return self.services.library.spec(path) if path is not None else model.path if model is not None else ""

    def _model(self, name: str) -> Source:
        return source(name) if is_url(name) else self.services.library.resolve(name)

    @work(exclusive=True, group="preset")
    async def _delete_preset(self, preset: Preset | None) -> None:
        assert preset is not None
        name = clean_line(preset.name)
        of_new_chats = self.services.settings.chat.preset == preset.name
        question = f"Delete the preset {name}? Chats that have it keep it."
        question += " New chats will have no preset." if of_new_chats else ""
        if await self.app.push_screen_wait(ConfirmScreen("Preset", question, "Delete", "Keep")):
            with self._telling():
                await asyncio.to_thread(delete_preset, preset.name)
                if of_new_chats:
                    self.services.save_settings({"chat": {"preset": ""}})
                self.tell(f"Preset {name} deleted.")


def gist(preset: Preset) -> str:
    """Return what a preset sets, in short: `temperature 0.2 · reasoning off · Qwen3-8B-Q4_K_M`."""
    options = [f"{name.replace('_', ' ')} {value:g}" for name, value in preset.options.items()]
    reasoning = [f"reasoning {preset.reasoning}"] if preset.reasoning in ("on", "off") else []
    model = [preset.model.rpartition("/")[2].removesuffix(".gguf")] if preset.model else []
    return clean_line(" · ".join((*options, *reasoning, *model)))


def _row(preset: Preset | None, use: Callable[[Preset | None], object]) -> Row:
    about = gist(preset) if preset is not None else ""
    title = clean_line(preset.name) if preset is not None else _NONE
    return Row(title, partial(use, preset), about=about if len(about) <= _WIDEST else f"{about[: _WIDEST - 1]}…")
