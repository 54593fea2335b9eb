"""The keys, and what the figures mean."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from cpuchat.tui import keys
from cpuchat.tui.widgets.dismissable import Dismissable

FIGURES = (
    ("tok/s", "speed of writing, over the last second while it writes; from first to last token afterwards"),
    ("first token", "from sending to the first token's text"),
    ("prefill", "speed of reading the prompt, counting only tokens that were really read"),
    ("remembered", "tokens of the prompt that were still known from before and cost nothing"),
    ("context", "tokens that the model sees now, of as many as it can; what no longer fits stays in the chat"),
    ("private", "memory that only the model's process holds: KV cache, buffers, rearranged weights"),
    ("shared", "weights mapped from the file; the system can drop and read them again"),
)
DRAFTING = (
    ("what it does", "drafters guess the next tokens; the model checks all of them in one pass and keeps those that it "
     "would have written itself. So the answers are the model's own; they only come sooner"),
    ("drafters", "suffix and lookup find how the chat went on where it was like this before, and cost next to nothing; "
     "a draft model is a small model with the same vocabulary"),
    ("depth", "how many tokens are guessed per pass. Adaptive measures what a pass costs on this machine and goes back "
     "to plain decoding, depth 0, where drafting would be slower"),
    ("acceptance", "share of the guessed tokens that were kept: of the last passes, and on average in this answer"),
    ("per pass", "tokens written per pass of the model; 1.0 is plain decoding"),
    ("by position", "acceptance of the first, second, ... token of a guess"),
    ("no drafts", "speed of plain decoding here; 1.64× beside tok/s is the speed against it"),
    ("% time", "share of the writing time in which the model waited for a drafter"),
)  # fmt: skip
MACHINE = (
    ("bandwidth", "weights and KV cache that the writing reads per second, of the most that these cores can read. "
     "≈ is worked out from the model; a counter's name in its place means that it was measured"),
    ("peak", "read bandwidth of the cores in use, measured when the model was first loaded; ╎ marks it on the bar"),
    ("no draft  ≤", "tok/s if memory were read at its peak and nothing else took time, without drafts"),
    ("this acc. ≤", "the same with drafts, at the acceptance and depth of now"),
    ("compute   ≤", "tok/s if only computing took time: the speed of prefill here"),
    ("calibration is off", "more than 105 % of the peak: it was measured while something else ran. "
     "cpuchat probe measures it again, for the next load"),
    ("in use, go back", "a layout says which cores compute and where memory is; it is tried with short answers before "
     "and after, and counts as faster only if it gains more than the answers differ among themselves"),
)  # fmt: skip
_GOOD_TO_KNOW = (
    "Select with the mouse and press Ctrl+C to copy. Tab moves between the panes; the arrow keys scroll the one with "
    "the bright border. Models and settings open with a key and close with Esc."
)


class HelpScreen(Dismissable[None]):
    """Generated from the key table, so it cannot lie."""

    CSS_PATH = "help.tcss"
    AUTO_FOCUS = "#help"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("help")

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help") as pane:
            pane.border_title = "Help"
            for group in dict.fromkeys(key.group for key in keys.KEYS):
                rows = [(keys.display_all(k.keys) or "palette", k.help) for k in keys.KEYS if k.group == group]
                rows = list(dict.fromkeys(rows))  # what several screens share is told once
                if group == keys.APP:
                    rows.append(("Tab", "Go to the next pane"))
                yield Static(group, classes="heading")
                yield Static(self._rows(rows), classes="rows")
            yield Static("What the figures mean", classes="heading")
            yield Static(self._rows(list(FIGURES)), classes="rows")
            yield Static("Drafting (speculative decoding)", classes="heading")
            yield Static(self._rows(list(DRAFTING)), classes="rows")
            yield Static("Memory and ceilings", classes="heading")
            yield Static(self._rows(list(MACHINE)), classes="rows")
            yield Static("Good to know", classes="heading")
            yield Static(_GOOD_TO_KNOW, classes="rows", markup=False)
        yield Footer(show_command_palette=False)

    @staticmethod
    def _rows(rows: list[tuple[str, str]]) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(width=20, no_wrap=True, style="bold")
        table.add_column(ratio=1)
        for left, right in rows:
            table.add_row(Text(left), Text(right))
        return table

    def action_close(self) -> None:
        self.dismiss(None)
