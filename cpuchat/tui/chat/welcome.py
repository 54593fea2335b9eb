"""Replaces the transcript while the chat is empty."""

from __future__ import annotations

import asyncio
import textwrap

from textual.app import ComposeResult
from textual.containers import Container
from textual.content import Content
from textual.widgets import Static
from textual.worker import Worker

from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.present.chats import Offer, Welcome
from cpuchat.present.downloads import without_hub
from cpuchat.telemetry.units import plural
from cpuchat.tui.services import Services
from cpuchat.tui.threads import result_of, yield_thread

WHAT = "Language models on your CPU, and how fast they could run"
COMPARE = "Show me Q4 against Q8, side by side"
DRAFTS = "Watch a real model, plain and with drafts"
RACE = "Watch Q4 race Q8 of a real model"
SUGGESTED_ACTIONS = {COMPARE: "compare(True)", DRAFTS: "replay('drafts')", RACE: "replay('quantizations')"}
"""Suggestions that are no question, and what they do."""
ACCEPTS = {"": "accept_offer"}
"""What Enter does in an empty prompt, unless a model of the user's is loaded."""
CODE = "Paste code and ask for a change"
"""What suffix decoding is best at: most of the answer is in the question."""
STARTS = {CODE: "Give the variables in this code better names, and show all of it:\n\n"}
"""What is put into the prompt for a question that the user has to complete."""
OF_DEMO = ("What can you do?", DRAFTS, RACE)
"""What to ask the demo model: it knows the program, and recordings show a real one."""
OF_OTHERS = ("What can you do?", CODE, COMPARE, "What is speculative decoding?")
_READING = Offer("Looking for your models…")


class WelcomePane(Container):
    """Shows what Enter opens or downloads, what can be asked, what this machine can run, and the keys.

    Each line is where it will be before it is read, and the longest decides over no other's place."""

    DEFAULT_CSS = """
    WelcomePane {
        width: 1fr;
        height: 100%;
        align: center middle;
        padding: 0 1;
        & > Static { width: 100%; max-width: 60; height: auto; link-style: none; }
    }
    """

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self.about = Welcome()
        """What is shown of this machine; its offer is what Enter does, once it is known."""
        self._reading: Worker[None] | None = None
        self._questions: tuple[str, ...] = ()
        self._problem = ""
        self._has_own = False
        self._n_chats = 0
        self._text, self._shown = Static(), ""
        self.border_title = "New chat"

    def compose(self) -> ComposeResult:
        yield self._text

    def count_chats(self, n_chats: int) -> None:
        """Say how many chats are stored, which F8 lists."""
        self._n_chats = n_chats
        self._draw()

    def on_mount(self) -> None:
        self._services.downloading.changed.subscribe(self, self._download_changed)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)  # a long name has other lines

    def show(self, questions: tuple[str, ...], *, has_own: bool, idle: bool, problem: str) -> None:
        """`questions` will be answered, () without a model, and `problem` says why. `has_own`: one of the user's is
        loaded, so that no other is named. `idle`: there is time to read what this machine can run; what is offered may
        have changed since."""
        self._questions, self._has_own, self._problem = questions, has_own, problem
        self._draw()
        if idle and (not has_own or self.about == Welcome()):
            self._read()

    async def wait_for_offer(self) -> Offer | None:
        """Return what Enter does, once it is read; None if that was given up, as when another model is loaded."""
        while self.about.offer is None and self._reading is not None and not self._reading.is_finished:
            await result_of(self._reading)
        return self.about.offer

    def _read(self) -> None:
        services, failed = self._services, frozenset(self._services.session.failed_loads)

        def read() -> Welcome:
            yield_thread()
            return services.describe_machine(services.settings, services.conversation.model, services.library, failed)

        async def read_and_draw() -> None:
            painted = asyncio.Event()
            self.screen.call_after_refresh(painted.set)  # the first frame waits for nothing
            await painted.wait()
            self.about = await run_in_daemon_thread(read)
            self._draw()

        self._reading = self.run_worker(read_and_draw(), exclusive=True)

    def _download_changed(self, download: Download) -> None:
        if download.state == "done" and self.about.offer is not None:
            self._read()  # it is the user's own now
        else:
            self._draw()

    def _offered(self) -> list[Content]:
        offer = self.about.offer or _READING
        repo = offer.model.repos[0] if offer.model is not None else ""
        coming = any(one.order.repo == repo and one.state in RUNNING for one in self._services.downloading.all())
        title, details = offer.title, offer.details
        unreached = self._services.downloading.hub_problem if repo else ""
        if coming:
            title = title.replace("Download", "Downloading", 1)
            details = "the demo answers meanwhile · Ctrl+G, Enter pauses it"
        elif unreached:
            title = f"Retry: {title}"
        if unreached:
            details = without_hub(unreached, "Ctrl+N")
        title, details = ("\n       ".join(textwrap.wrap(text, self._width - 7)) for text in (title, details))
        does = offer.path is not None or (offer.model is not None and not coming)
        click = "[$heading b]Enter[/]  [@click=screen.accept_offer]$title[/]" if does else "       $title"
        return [Content.from_markup(click, title=title), Content(f"       {details}")]

    @property
    def _width(self) -> int:
        return max(self._text.size.width or 60, 30)

    def _draw(self) -> None:
        indent = 1 if self._has_own else 5
        questions = [
            Content.from_markup(
                f"[$heading b]{number:<{indent}}[/]  [@click=screen.suggest({number})]$question[/]", question=question
            )
            for number, question in enumerate(self._questions, 1)
        ]
        machine = Content(self.about.machine)
        if self._has_own:
            lines = [*questions, Content(""), machine, Content("")]
        else:
            why = textwrap.wrap(self._problem, self._width) or ["No model is loaded."]
            none = [] if questions else [*map(Content, why), Content("")]
            lines = [*none, *([Content(WHAT), Content("")] if questions else []), *self._offered(), *questions]
            lines += [Content(""), machine]
        by_number = questions and not self._has_own
        keys = "1 to 3, then Enter · Ctrl+O your models" if by_number else "Ctrl+O models · Alt+S this chat"
        if self._n_chats:
            keys = f"{keys.rpartition(' · ')[0]} · F8 {plural(self._n_chats, 'chat')}"
        text = Content("\n").join([*lines, Content(f"{keys} · F1 help")])
        if text.plain != self._shown:  # progress of a download causes no layout
            self._shown = text.plain
            self._text.update(text)
