"""The app: themes, keys, commands and quitting. Screens do the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, ClassVar

from platformdirs import user_downloads_path
from textual import events, work
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.filter import LineFilter
from textual.markup import escape
from textual.notifications import SeverityLevel
from textual.screen import Screen
from textual.widgets import Input, TextArea

from cpuchat.base.errors import SettingsError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean, clean_line
from cpuchat.config.servers import KeyRing, Source
from cpuchat.config.settings import SettingSources, unknown_keys
from cpuchat.models.library.library import Library
from cpuchat.session.attachments import start_folder
from cpuchat.session.conversation import Conversation
from cpuchat.telemetry.units import plural
from cpuchat.tools.config import ToolServerConfig
from cpuchat.tui import clipboard, commands, keys, themes
from cpuchat.tui.chat.screen import ChatScreen
from cpuchat.tui.downloading import Opener, open_downloads
from cpuchat.tui.services import Services
from cpuchat.tui.terminal import crash, painter
from cpuchat.tui.terminal.background import BackgroundReported, is_light_at_start, remember
from cpuchat.tui.terminal.crash import GuardedApp
from cpuchat.tui.terminal.driver import Gate, OrderedKeys
from cpuchat.tui.widgets import graphemes
from cpuchat.tui.widgets.dialogs import ConfirmScreen

if TYPE_CHECKING:
    from cpuchat.compare.comparison import Sides

_INPUT = (events.Key, events.Paste, events.MouseDown, events.MouseScrollDown, events.MouseScrollUp)
_TWICE_SECONDS = 3.0
_TWICE_LATE_SECONDS = 1.0
"""Seconds after the second request to quit until the app exits forcibly."""
_LAST_WORDS_SECONDS = 2.0  # for an answer to end in order; a worker that hangs never does


class ChatApp(OrderedKeys[int], GuardedApp[int]):
    """The terminal app around one `Conversation`, which it closes when it ends. `initial_model` is loaded after the
    first paint, None starts without a model; with `sides`, these are compared first. `downloads` makes the manager of
    the downloads when the first one is asked for; `sources`: where the settings come from; `tool_servers`: MCP servers
    to start."""

    # The chat is the default screen, whose own sheet Textual does not load. Subclasses are in other folders.
    CSS_PATH: ClassVar = [Path(__file__).parent / "app.tcss", Path(__file__).parent / "chat/chat.tcss"]
    TITLE = "cpuchat"
    COMMANDS: ClassVar = {commands.Commands}
    PAUSE_GC_ON_SCROLL = True
    SUSPENDED_SCREEN_CLASS = ""  # see LeanScreen
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("app")

    def __init__(
        self,
        conversation: Conversation,
        library: Library,
        initial_model: Source | None,
        *,
        sides: Sides | None = None,
        downloads: Opener = open_downloads,
        key_ring: KeyRing | None = None,
        sources: SettingSources | None = None,
        tool_servers: Mapping[str, ToolServerConfig | SettingsError] | None = None,
    ) -> None:
        self._gate = Gate()
        painter.keep()
        graphemes.install()
        super().__init__()
        self.conversation = conversation
        self.services = Services(self, conversation, library, downloads, key_ring, sources)
        self.services.show_theme, self.services.keys_held = self.show_theme, self.keys_held
        self.services.tool_servers = tool_servers or {}
        self.saved = True
        """False if the last answer could not be saved at exit."""
        self._copying = asyncio.Lock()
        self._initial = initial_model
        self._sides = sides
        self.chat_screen = ChatScreen(self.services, None if sides else initial_model)
        self._ended = False
        self._ctrl_c_at = self._interrupted_at = float("-inf")
        self._own_themes, self._own_keys = themes.load_themes(), keys.load_keymap()
        for theme in self._own_themes.themes.values():
            self.register_theme(theme)
        self.services.keymap = self._own_keys.moved
        self.set_keymap({id: moved or keys.unbound(id) for id, moved in self._own_keys.moved.items()})
        self.asks_background = self.console.color_system != "standard"
        self._is_light = is_light_at_start()
        # While no style sheet has been parsed: changing the theme later parses all of them again.
        wanted = self._named_theme(conversation.settings.ui.theme)
        known = [name for name in (wanted, themes.DEFAULT_THEME, "textual-dark") if name in self.available_themes]
        self.set_reactive(ChatApp.theme, known[0])
        theme = self.current_theme
        classes = {f"-theme-{theme.name}": True, "-dark-mode": theme.dark, "-light-mode": not theme.dark}
        self.update_classes(classes, update=False)
        self._refresh_truecolor_filter(self.ansi_theme)
        self.stylesheet.set_variables(self.get_css_variables())
        self._moves = conversation.settings.ui.motion
        if not self._moves:
            self.animation_level = "none"

    def _named_theme(self, name: str) -> str:
        """Return the theme that a name in the settings means: `auto` is the default that suits the terminal."""
        if name != themes.AUTO:
            return name
        if not self.asks_background:
            return themes.FOR_16_COLORS
        return themes.LIGHT_THEME if self._is_light else themes.DEFAULT_THEME

    def show_theme(self, name: str) -> None:
        """Show the theme that a name in the settings means; nothing happens without one."""
        if (theme := self._named_theme(name)) in self.available_themes:
            self.theme = theme

    def on_background_reported(self, event: BackgroundReported) -> None:
        is_auto = self.services.settings.ui.theme == themes.AUTO and self.theme == self._named_theme(themes.AUTO)
        self._is_light = event.is_light
        if is_auto:
            self.show_theme(themes.AUTO)
        self.run_worker(run_in_daemon_thread(lambda: remember(event.is_light)), group="background")

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), self._gate]

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """Show a passing message, its title on the same line: most fit into the footer's.

        Replaces the information shown before; warnings and errors stay until their time is up."""
        for shown in [one for one in self._notifications if one.severity == "information"]:
            self._unnotify(shown, refresh=False)
        if head := clean_line(title):
            message = f"{escape(head) if markup else head}: {message}"
        super().notify(clean(message), severity=severity, timeout=timeout, markup=markup)

    def copy_to_clipboard(self, text: str, what: str = "") -> None:
        """Copy by the terminal, and by a program where there is one. `what` was copied, for the notice that says so."""
        super().copy_to_clipboard(text)
        if text:
            self.tell_copied(text, what or plural(len(text), "character"))

    @work(group="clipboard")
    async def tell_copied(self, text: str, what: str) -> None:
        async with self._copying:  # the last text stays
            by = await run_in_daemon_thread(lambda: clipboard.copy(text))
        self.notify(clipboard.told(what, by), markup=False)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.own_variables(self.current_theme)

    def get_css_variables(self) -> dict[str, str]:
        theme = self.current_theme
        return {**super().get_css_variables(), **themes.scrollbars(theme), **theme.variables}

    def get_default_screen(self) -> Screen[None]:
        return self.chat_screen

    def on_mount(self) -> None:
        of_themes = [f"{file.name}: {reason}" for file, reason in self._own_themes.problems.items()]
        if (wanted := self.conversation.settings.ui.theme) not in (themes.AUTO, *self.available_themes):
            names = ", ".join((themes.AUTO, *sorted(self.available_themes)))
            of_themes.append(f"no theme named “{wanted}”. Choose one of {names}.")
        of_settings = [f"config.toml: no setting named {key}" for key in unknown_keys()]
        for title, problems in (
            ("Themes skipped", of_themes), ("Keys skipped", self._own_keys.problems), ("Settings skipped", of_settings)
        ):  # fmt: skip
            if problems:
                self.notify("\n".join(problems), title=title, severity="warning", timeout=10, markup=False)
        self.call_after_refresh(self.services.downloading.restore)
        if self._sides is not None:
            self.call_after_refresh(self.chat_screen.commands.compare_sides, self._sides, then=self._initial)

    def on_resize(self) -> None:
        """Redraw everything: a terminal resized twice has cut its text, and Textual ignores a size it already knows."""
        self.refresh()

    def on_app_focus(self) -> None:
        self.chat_screen.list_chats()  # another window may have changed them

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        if not self._moves and isinstance(event.widget, Input | TextArea):
            event.widget.cursor_blink = False

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, _INPUT):
            if self._exit:  # nothing opens any more, for which each key would wait
                return
            self.services.on_input()
        await super().on_event(event)

    # Commands

    @property
    def moved_keys(self) -> tuple[keys.Key, ...]:
        """Return the keys of all actions, with those that the user moved."""
        return keys.moved(self.services.keymap)

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(commands.ActionPalette())

    def action_screenshot(self, filename: str | None = None, path: str | None = None) -> None:
        """Save the screen among the downloads, or in the current folder where there are none."""
        downloads = user_downloads_path()
        super().action_screenshot(filename, path or str(downloads if downloads.is_dir() else start_folder()))

    def get_key_display(self, binding: Binding) -> str:
        return binding.key_display or keys.display(binding.key)

    # Help and the way out

    def action_help(self) -> None:
        from cpuchat.tui.help import HelpScreen

        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss(None)
        else:
            here = {binding.id for _, bound in self.screen._binding_chain for _, binding in bound if binding.id}
            self.push_screen(HelpScreen(self.moved_keys, here))

    async def action_help_quit(self) -> None:
        """Stop what is written or loaded on Ctrl+C; with nothing to stop, or if it goes on, a second press quits."""
        now = monotonic()
        if await getattr(self.screen, "interrupt", self.chat_screen.interrupt)():
            if now - self._interrupted_at < _TWICE_SECONDS:
                self.action_leave()
            self._interrupted_at = now
            return
        if now - self._ctrl_c_at < _TWICE_SECONDS:
            self.action_leave()
        else:
            self._ctrl_c_at = now
            self.notify("Ctrl+C again quits.", timeout=_TWICE_SECONDS)

    async def action_quit(self) -> None:
        self.action_leave()

    def action_leave(self) -> None:
        """Stop, save, end the worker, exit with 0. Called twice: exit at once."""
        if self.services.leaving:
            self.services.kill_workers()  # with which the first leaving ends, unless something else hangs
            self.set_timer(_TWICE_LATE_SECONDS, lambda: self.exit(0))
            return
        self.services.leaving = True
        self._leave()

    @work(group="leave")
    async def _leave(self) -> None:
        if self.services.quantizing.job is not None:
            question = "A model is being quantized; the partial file will be deleted."
            if await self.push_screen_wait(ConfirmScreen("Quit", question, "Quit", "Stay")) != "yes":
                self.services.leaving = False
                return
        await self._last_words()
        await self._end()
        self.exit(0)

    async def _last_words(self) -> None:
        """Wait until the answer is saved; a worker that hangs is killed."""
        ending = asyncio.ensure_future(self.chat_screen.finish())
        if not (await asyncio.wait({ending}, timeout=_LAST_WORDS_SECONDS))[0]:
            self.services.kill_workers()
            await asyncio.wait({ending}, timeout=_TWICE_LATE_SECONDS)

    def end_by(self, number: int) -> None:
        """Restore the terminal first, without questions: the user may be waiting for a shell."""
        super().end_by(number)
        self.services.leaving = True

    async def _end(self) -> None:
        """Close the jobs and the conversation, once. An error in one does not prevent closing the others."""
        if self._ended:
            return
        self._ended = True
        services, self.saved = self.services, False
        jobs = (services.downloading.close, services.quantizing.close, services.close_comparison)
        for close in (*jobs, services.close_conversation):
            try:
                await close()
                self.saved = self.conversation.history.saver.answer is None  # by the last one
            except Exception as error:
                self.saved = False
                self.crash = self.crash or crash.record(error)

    async def on_unmount(self) -> None:
        if not self._ended:  # not left in order
            await self._last_words()
        await self._end()
