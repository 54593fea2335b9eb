"""Replaces the transcript while the chat is empty."""

from __future__ import annotations

from textual import work
from textual.content import Content
from textual.widgets import Static

from cpuchat.present.welcome import Welcome, serving
from cpuchat.tui.services import Services
from cpuchat.tui.threads import run_in_daemon_thread

COMPARE = "Show me Q4 against Q8, side by side"
"""Opens the compare screen."""
QUESTIONS = (
    "What can you do?",
    "Which model should I download?",
    COMPARE,
    "What is speculative decoding?",
)


def questions(can_compare: bool | None) -> tuple[str, ...]:
    """Return the questions that can be answered."""
    return tuple(one for one in QUESTIONS if one != COMPARE or can_compare)


class WelcomePane(Static):
    """Shows four questions, what this machine can run, and the keys."""

    DEFAULT_CSS = """
    WelcomePane { width: 1fr; height: 100%; content-align: center middle; padding: 0 1; link-style: none; }
    """

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self._about = Welcome()
        self._serving = ""
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
        services, before = self._services, (self._about, self._serving)
        if self._about == Welcome():
            self._about = await run_in_daemon_thread(
                lambda: services.describe_machine(services.settings, services.conversation.model)
            )
        self._serving = await run_in_daemon_thread(serving)  # servers come and go
        if (self._about, self._serving) != before:
            self._draw()

    def _draw(self) -> None:
        lines: list[Content] = []
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
        if self._about.machine:
            lines += [Content(""), Content(self._about.machine)]
        if self._about.model:
            lines.append(Content(f"Recommended: {self._about.model}"))
        if self._serving:
            lines.append(Content(self._serving))
        models = " · Ctrl+O models" if self.screen.check_action("models", ()) else ""
        lines += [Content(""), Content(f"Enter sends · Ctrl+J new line{models} · F1 help")]
        self.update(Content("\n").join(lines))
