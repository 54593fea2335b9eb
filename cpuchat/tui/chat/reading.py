"""A stored chat, to be read while an answer is written in another one."""

from __future__ import annotations

from functools import partial

from textual.app import ComposeResult
from textual.content import Content

from cpuchat.base.text import clean_line
from cpuchat.chats.records import Chat, StoredMessage, Tree
from cpuchat.tui.chat.telemetry import TelemetryLine
from cpuchat.tui.chat.transcript import stored_message, system_prompt
from cpuchat.tui.markdown.transcript import Transcript
from cpuchat.tui.services import SPARE, Services
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter


class ReadingScreen(Dismissable[bool], keys="reading"):
    """Returns True when the chat is to be opened. The line of figures follows the answer, which goes on."""

    def __init__(self, services: Services, opened: tuple[Chat, Tree, list[StoredMessage]], message_id: int) -> None:
        """`opened` as of `ChatHistory.read`; shown from `message_id` on, or from the end."""
        super().__init__()
        self._services, self._opened, self._top = services, opened, message_id
        self._transcript = Transcript(id="transcript")

    def compose(self) -> ComposeResult:
        yield self._transcript
        yield TelemetryLine()
        yield KeyFooter()

    def on_mount(self) -> None:
        chat, tree, messages = self._opened
        self._transcript.border_title = Content(clean_line(chat.title))
        rows = [*system_prompt(chat.system_prompt), *(partial(stored_message, one, tree) for one in messages)]
        ids = [0] * (len(rows) - len(messages)) + [one.id for one in messages]
        self._transcript.set_messages(rows, ids.index(self._top) if self._top in ids[-len(messages) :] else None)
        self.set_interval(SPARE.figures, self._follow)
        self.call_after_refresh(self._follow)

    def _follow(self) -> None:
        session = self._services.session
        answered = session.history.chat.title if session.history.chat is not None else "the new chat"
        state = "being written" if session.writing else "done"
        self._transcript.border_subtitle = Content(clean_line(f"answer {state} · {answered}"))
        self.query_one(TelemetryLine).show(session.conversation.figures(), None)

    def action_open(self) -> None:
        if not self._services.session.refuse_while_writing("go on in this chat"):
            self.dismiss(True)
