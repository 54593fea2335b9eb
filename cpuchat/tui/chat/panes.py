"""Shows and hides parts of the chat screen: chat list, figures, colors; and applies settings."""

from __future__ import annotations

from textual import work

from cpuchat.config.servers import ServerModel
from cpuchat.tui.chat import draft_controls
from cpuchat.tui.chat.chat_list import ChatList, Chats
from cpuchat.tui.chat.tool_servers import ToolServersScreen
from cpuchat.tui.keys import renamed
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from cpuchat.tui.widgets.prompt import Prompt


class PanesScreen(ToolServersScreen):
    """Base of the chat screen."""

    _chats: ChatList
    _prompt: Prompt

    def tell(self, text: str, severity: str = "information") -> None:
        super().tell(renamed(text, self.services.keymap), severity)

    def _apply_ui_settings(self) -> None:
        ui = self.services.settings.ui
        self.set_class(not ui.sidebar, "-no-sidebar")
        self.set_class(not ui.telemetry, "-no-telemetry")
        self._transcript.color_drafts(ui.color_drafts)

    def action_sidebar(self) -> None:
        if self.has_class("-wide"):
            hidden = not self.has_class("-no-sidebar")
            self.set_class(hidden, "-no-sidebar")
            self.services.save_settings({"ui": {"sidebar": not hidden}})
            shown = not hidden
        else:
            self.toggle_class("-chats-over")
            shown = self.has_class("-chats-over")
        (self._chats.query_one(Chats) if shown else self._prompt).focus()
        self.refresh_bindings()

    def action_telemetry(self) -> None:
        self.toggle_class("-no-telemetry")
        self.services.save_settings({"ui": {"telemetry": not self.has_class("-no-telemetry")}})
        self._figures.show()

    def action_drafting(self) -> None:
        self.tell(draft_controls.cycle(self.services))
        self._figures.show()

    def action_color_drafts(self) -> None:
        if text := draft_controls.color(self.services, self._transcript):
            self.tell(text)

    @work
    async def action_settings(self) -> None:
        if (result := await self.services.navigation.settings()) is None:
            return
        before, self.conversation.settings = self.services.settings, result
        if result.ui.theme != before.ui.theme:
            self.services.show_theme(result.ui.theme)
        self._apply_ui_settings()
        self._show_prompt_title()
        await self._reader.settings_changed(before.speech)
        if result.model.folders != before.model.folders:
            self.services.set_folders(result.model.folders)
        self._figures.show()
        if not draft_controls.needs_reload(before, result) or self._stream.path is None:
            return
        if self._stream.busy or isinstance(self._stream.path, ServerModel):
            self.tell("Some of these settings take effect on the next load of a model on this machine.")
        else:
            question = "Some of these settings take effect on the next load. Reload the model now?"
            if await self.app.push_screen_wait(ConfirmScreen("Settings", question, "Reload", "Later", False)):
                self.load_model(self._stream.path)
