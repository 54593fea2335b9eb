"""Tools on the chat screen: which the model may call, and asking before each call."""

from __future__ import annotations

import asyncio
from functools import cached_property
from pathlib import Path

from textual import work

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError
from cpuchat.base.text import clean_line
from cpuchat.protocol.messages import Tool, ToolCall
from cpuchat.tools.folder import Folder
from cpuchat.tools.loop import Approvals, Choice, FolderSource, Source, Toolbox, ToolLoop
from cpuchat.tools.servers import ToolServer
from cpuchat.tui.chat.answering import RUNNING, Answering
from cpuchat.tui.chat.call_screen import CallScreen
from cpuchat.tui.chat.presets import PresetsScreen
from cpuchat.tui.chat.status import StatusLine
from cpuchat.tui.widgets.dialogs import AskTextScreen, ChoiceScreen
from cpuchat.tui.widgets.dialogs import Choice as Answer


class CallingScreen(PresetsScreen):
    """Base of the chat screen."""

    _answering: Answering

    def __init__(self) -> None:
        super().__init__()
        self.tool_servers: dict[str, ToolServer] = {}
        """The MCP servers that are offered, by name."""
        self._tools_folder: Folder | None = None
        self._toolbox = Toolbox(())

    def offer_folder(self, path: Path | None) -> None:
        """Let the model read files in a folder, none if None, from the next answer on. Raises UsageError."""
        folder = Folder(path) if path is not None else None
        if self._tools_folder is not None:
            self._tools_folder.close()
        self._tools_folder = folder
        self.offer_tools()

    def _chat_left(self) -> None:
        """Offer the folder of the command line again, or none: `/tools` holds for one chat."""
        super()._chat_left()
        path, wanted = self._tools_folder and self._tools_folder.path, self.services.tools_folder
        if path != wanted:
            self.offer_folder(wanted)
            now = (
                "The model can no longer read files" if wanted is None else f"The model may read {paths.shown(wanted)}"
            )
            self.tell(f"{now}: /tools holds for one chat.")

    def tell_offered(self, text: str) -> None:
        """Tell that other tools are offered, which stand at the beginning of the prompt, and what that costs."""
        n_past = self.conversation.history.n_past
        self.tell(f"{text} The prompt changes: {n_past:,} tokens are evaluated again." if n_past else text)

    def offer_tools(self) -> None:
        """Let the model call what there is, from the next answer on."""
        folder = self._tools_folder
        sources: list[Source] = [FolderSource(folder)] if folder is not None else []
        box = self._toolbox
        box.sources = (*sources, *self.tool_servers.values())
        box.collect()
        self.conversation.tools = self._tool_loop if box.sources else None
        self.query_one(StatusLine).show_tools(len(box.tools))

    @cached_property
    def _tool_loop(self) -> ToolLoop:
        """Return the only one: the answer that runs may have it."""
        return ToolLoop(self._toolbox, self._approvals, self._ask_call)

    @cached_property
    def _approvals(self) -> Approvals:
        """Return what was approved in this run of the app, and for good."""
        return Approvals(paths.approvals_file())

    @work(exclusive=True, group="tools")
    async def action_tools(self, wanted: str = "") -> None:
        """Let the model read files in a folder, "off" for none; "" asks which."""
        if self.refuse_while_writing("change the tools"):
            return
        chosen = wanted or await self._ask_folder()
        if chosen and self.refuse_while_writing("change the tools"):  # a queued message was sent
            return
        if chosen == "off":
            self.offer_folder(None)
            self.tell_offered("The model can no longer read files.")
        elif chosen:
            try:
                self.offer_folder(paths.expanded(chosen))
            except CpuchatError as error:
                self.refuse(str(error), "error")
            else:
                self.tell_offered(f"The model may read files in {clean_line(chosen)}. Each call needs your approval.")

    async def _ask_folder(self) -> str | None:
        """Return a folder, or "off"; None: nothing changes."""
        path = self._tools_folder.path if self._tools_folder is not None else None
        if path is not None:
            question = (
                f"The model may list, read and search files in {paths.shown(path)}. Each call needs your approval."
            )
            choices = (Answer("keep", "Keep"), Answer("change", "Change…"), Answer("off", "Turn off"))
            choice = await self.app.push_screen_wait(ChoiceScreen("Tools", question, choices))
            if choice != "change":
                return choice if choice == "off" else None
        title = "Folder in which the model may read files"
        return await self.app.push_screen_wait(AskTextScreen(title, paths.shown(path or Path.cwd()), 4096))

    @work(exclusive=True, group="tools")
    async def action_forget_approvals(self) -> None:
        """Ask again before every call."""
        await asyncio.to_thread(self._approvals.forget_all)
        self.tell("Every tool call needs your approval again.")

    async def _ask_call(self, tool: Tool, call: ToolCall) -> Choice:
        """Show a call; returns what the user chooses."""
        dialog = CallScreen(tool, call)
        self._answering.show_call("waiting for your approval")
        chosen = self.app.push_screen(dialog, wait_for_dismiss=True)
        try:
            choice = await asyncio.shield(chosen)  # dismissing sets its result
            self._answering.show_call(RUNNING)
            return choice
        finally:
            if not chosen.done():  # the answer was stopped
                await dialog.dismiss_when_on_top("refuse")
