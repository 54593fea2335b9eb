"""Replaces the transcript while the chat is empty."""

from __future__ import annotations

from textual import work
from textual.content import Content
from textual.widgets import Static

from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.present.chats import Welcome
from cpuchat.tui.services import Services

WHAT = "Language models on your CPU, and how fast they could run"
COMPARE = "Show me Q4 against Q8, side by side"
DRAFTS = "Watch a real model, plain and with drafts"
RACE = "Watch Q4 race Q8 of a real model"
SUGGESTED_ACTIONS = {COMPARE: "compare(True)", DRAFTS: "replay('drafts')", RACE: "replay('quantizations')"}
"""Suggestions that are no question, and what they do."""
CODE = "Paste code and ask for a change"
"""What suffix decoding is best at: most of the answer is in the question."""
STARTS = {CODE: "Give the variables in this code better names, and show all of it:\n\n"}
"""What is put into the prompt for a question that the user has to complete."""
OF_DEMO = ("What can you do?", DRAFTS, RACE)
"""What to ask the demo model: it knows the program, and recordings show a real one."""
OF_OTHERS = ("What can you do?", CODE, COMPARE, "What is speculative decoding?")


class WelcomePane(Static):
    """Shows what can be asked, what this machine can run, and the keys."""

    DEFAULT_CSS = """
    WelcomePane { width: 1fr; height: 100%; content-align: center middle; padding: 0 1; link-style: none; }
    """

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self._about = Welcome()
        self._questions: tuple[str, ...] = ()
        self.border_title = "New chat"

    def show(self, questions: tuple[str, ...], idle: bool) -> None:
        """`questions` will be answered, () without a model. `idle`: there is time to read what this machine can run."""
        self._questions = questions
        self._draw()
        if idle:
            self._read()

    @work(exclusive=True)
    async def _read(self) -> None:
        services = self._services
        if self._about == Welcome():
            self._about = await run_in_daemon_thread(
                lambda: services.describe_machine(services.settings, services.conversation.model, services.library)
            )
            self._draw()

    def _draw(self) -> None:
        lines: list[Content] = []
        is_first = self._services.first_run and bool(self._questions) and CODE not in self._questions
        if self._questions:
            lines = [
                Content.from_markup(
                    f"[$heading b]{number}[/]  [@click=screen.suggest({number})]$question[/]", question=question
                )
                for number, question in enumerate(self._questions, 1)
            ]
        else:
            lines = [Content("No model is loaded."), Content.from_markup("[$heading b]Ctrl+O[/]  choose one")]
        width = max(line.cell_length for line in lines)
        lines = [line.pad_right(width - line.cell_length) for line in lines]
        if CODE not in self._questions:
            lines = [Content(WHAT), Content(""), *lines]
        # Lines that are being read keep their places. With a model of one's own loaded, no other is named.
        about = (self._about.machine, *([self._about.model] if CODE not in self._questions else []))
        lines += [Content(""), *map(Content, about)]
        if is_first:
            keys = "1 to 3, then Enter · Ctrl+O your own model · F1 help"
        else:
            keys = "Ctrl+O models · Alt+S this chat · F1 help"
        lines += [Content(""), Content(keys)]
        self.update(Content("\n").join(lines))
