"""What stands in the place of the transcript while the chat is empty."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from cpuchat.present.welcome import Welcome

QUESTIONS = (
    "What can you do?",
    "Which model should I download?",
    "What is quantization?",
    "What is speculative decoding?",
)


class WelcomePane(Static):
    """Four questions to begin with, what this machine can run, and the keys."""

    DEFAULT_CSS = """
    WelcomePane { width: 1fr; height: 100%; content-align: center middle; padding: 0 1; }
    """

    def show(self, has_model: bool, about: Welcome) -> None:
        """`has_model`: questions can be answered, or will be once the model is loaded."""
        self.border_title = "New chat"
        lines: list[Content] = []
        if has_model:
            lines = [
                Content.from_markup(
                    f"[@click=screen.suggest({number})][$accent b]{number}[/]  $question[/]", question=question
                )
                for number, question in enumerate(QUESTIONS, 1)
            ]
        else:
            lines = [Content("No model is loaded."), Content.from_markup("[$accent b]Ctrl+O[/]  choose one")]
        width = max(line.cell_length for line in lines)
        lines = [line.pad_right(width - line.cell_length) for line in lines]
        if about.machine:
            lines += [Content(""), Content(about.machine)]
        if about.model:
            lines.append(Content(f"Recommended: {about.model}"))
        lines += [Content(""), Content("Enter sends · Ctrl+J new line · Ctrl+O models · F1 help")]
        self.update(Content("\n").join(lines))
