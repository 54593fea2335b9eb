"""Replaces the transcript while the chat is empty."""

from __future__ import annotations

from textual import work
from textual.content import Content
from textual.widgets import Static

from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.present.chats import Welcome, serving
from cpuchat.tui.keys import renamed
from cpuchat.tui.services import Services

COMPARE = "Show me Q4 against Q8, side by side"
"""Opens the compare screen."""
CODE = "Paste code and ask for a change"
"""What free drafters are best at: most of the answer is in the question."""
STARTS = {CODE: "Give the variables in this code better names, and show all of it:\n\n"}
"""What is put into the prompt for a question that the user has to complete."""
QUESTIONS = (
    "What can you do?",
    "Which model should I download?",
    COMPARE,
    "What is speculative decoding?",
)
_OF_OTHERS = (QUESTIONS[0], CODE, *QUESTIONS[2:])


FIRST_RUN = {"What can you do?": "Ask", "What is speculative decoding?": "Watch", COMPARE: "Compare"}
"""Questions of a first run with the demo model, and what each shows."""
_STEPS_WIDTH = len("1  Compare  ") + max(map(len, FIRST_RUN))


def questions(is_demo: bool, can_compare: bool | None, first_run: bool = False) -> tuple[str, ...]:
    """Return what to ask: the demo model knows the answers to the questions, any other model can work."""
    offered = _OF_OTHERS if not is_demo else FIRST_RUN if first_run else QUESTIONS
    return tuple(one for one in offered if one != COMPARE or can_compare)


def start_of(question: str) -> str:
    """Return what is put into the prompt for it."""
    return STARTS.get(question, question)


class WelcomePane(Static):
    """Shows four questions, what this machine can run, and the keys; in the first run three steps."""

    DEFAULT_CSS = """
    WelcomePane { width: 1fr; height: 100%; content-align: center middle; padding: 0 1; link-style: none; }
    """

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self._about = Welcome()
        self._serving = ""
        self._questions: tuple[str, ...] = ()
        self._has_room = True
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

    def on_resize(self) -> None:
        """Leave the steps of the first run out where a question would be broken into two lines."""
        has_room = self.content_size.width >= _STEPS_WIDTH
        if has_room != self._has_room:
            self._has_room = has_room
            self._draw()

    def _draw(self) -> None:
        lines: list[Content] = []
        first_run = self._services.first_run and bool(self._questions) and CODE not in self._questions
        if self._questions:
            lines = [
                Content.from_markup(
                    f"[$heading b]{number}[/]  $step[@click=screen.suggest({number})]$question[/]",
                    step=f"{FIRST_RUN[question]:<9}" if first_run and self._has_room else "",
                    question=question,
                )
                for number, question in enumerate(self._questions, 1)
            ]
        else:
            opens = renamed("Ctrl+O", self._services.keymap)
            lines = [Content("No model is loaded."), Content.from_markup("[$heading b]$key[/]  choose one", key=opens)]
        width = max(line.cell_length for line in lines)
        lines = [line.pad_right(width - line.cell_length) for line in lines]
        if self._about.machine:
            lines += [Content(""), Content(self._about.machine)]
        if self._about.model:
            lines.append(Content(f"Recommended: {self._about.model}"))
        if self._serving:
            lines.append(Content(self._serving))
        if first_run:
            keys = "Enter sends · F9 drafts · Ctrl+T colors drafts · F1 help"
        else:
            models = "Ctrl+O models · " if self.screen.check_action("models", ()) else ""
            keys = f"{models}Alt+S system prompt · F1 help"
        lines += [Content(""), Content(renamed(keys, self._services.keymap))]
        self.update(Content("\n").join(lines))
