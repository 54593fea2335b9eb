"""The help screen: keys and figures, those of the screen that it was opened on first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Input, Static

from cpuchat.protocol.drafters import DRAFTERS
from cpuchat.tui import keys
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter

FIGURES = (
    ("tok/s", "decoding speed over the last second; once the answer is done, from its first token to its last"),
    ("timeline", "tok/s of the last minute, up to the limit that applies, which is the line above it"),
    ("first token", "time from sending to the first token"),
    ("prefill", "prompt tokens evaluated per second; reused tokens do not count"),
    (
        "reused",
        "prompt tokens found in a KV cache, the current or a saved one; the lowest rows say why not more. Models "
        "whose KV cache cannot be cut anywhere continue from a checkpoint; tokens after it are re-evaluated",
    ),
    ("context", "tokens in the context; older messages that no longer fit stay in the chat"),
    ("private mem", "memory of the worker alone: KV cache, buffers, repacked weights"),
    ("shared mem", "weights mapped from the file; the kernel can drop and read them again"),
)
DRAFTING = (
    ("drafting", "drafters propose the next tokens; the model verifies all of them in one pass and keeps those that it "
     "would have sampled itself. The text is the same, only faster"),
    ("drafters", "; ".join(f"{row.name} {row.help}" for row in DRAFTERS)),
    ("depth", "tokens drafted per pass. Adaptive depth follows the measured cost of a pass, and is 0 where drafting "
     "would be slower than plain decoding"),
    ("acceptance", "share of drafted tokens that were accepted: in the last passes, and on average"),
    ("per pass", "tokens per pass; 1.0 is plain decoding"),
    ("by position", "acceptance of the first, second, … drafted token"),
    ("plain", "plain decoding speed here; 1.64× beside tok/s is the speed-up over it"),
    ("% time", "share of the decoding time spent waiting for drafts"),
)  # fmt: skip
MACHINE = (
    ("bandwidth", "weights and KV cache read per second, of the read bandwidth of these cores. “estimated” "
     "is computed from the model; otherwise the name of the hardware counter"),
    ("peak", "read bandwidth of the cores in use, measured at the first load; ╎ marks it on the bar"),
    ("limit without drafts", "of plain decoding: peak bandwidth ÷ bytes per token"),
    ("limit with drafts", "of drafting at the current acceptance and depth"),
    ("limit by compute", "if only compute took time, from the prefill speed"),
    ("peak too low", "the bandwidth exceeds 105 % of the measured peak, because other programs ran during that "
     "measurement. `cpuchat probe` repeats it"),
    ("rough speeds", "other programs ran, or the answer was faster than a limit, which is not shown then"),
    ("placement", "which cores compute, and where memory is allocated"),
)  # fmt: skip
SERVERS = (
    ("source", "who counted drafted tokens: the server"),
    ("≈", "beside tok/s and tokens: counted by the parts of text that came, each of which may hold several tokens"),
)
_FIGURES = {
    "Figures": FIGURES,
    "Speculative decoding": DRAFTING,
    "Memory bandwidth and ceilings": MACHINE,
    "Models on servers": SERVERS,
}
"""Blocks about figures, by title."""
_TIPS = (
    "Tips",
    [
        ("mouse", "Select text with it; Ctrl+C copies", ""),
        ("Tab", "Moves between panes; the arrow keys scroll the focused one", ""),
        ("Esc", "Closes every screen", ""),
    ],
)


Row = tuple[str, str, str]
"""A key or figure, its text, and other words that find it."""
Section = tuple[str, list[Row]]


def key_sections(offered: Sequence[keys.Key]) -> Iterator[Section]:
    """Yield keys under their headings; a line that several screens share appears once."""
    for group in dict.fromkeys(map(keys.heading, offered)):
        listed = [key for key in offered if keys.heading(key) == group]
        rows = {(keys.display_all(key.keys) or "palette", key.help): key.found_by for key in listed}
        yield group, [(*row, words) for row, words in rows.items()]


class HelpScreen(Dismissable[None], keys="help"):
    """The keys of the screen below, whose ids are `here`, then figures, then all other keys; with a filter."""

    CSS_PATH = "help.tcss"
    AUTO_FOCUS = "Input"
    COMPONENT_CLASSES: ClassVar[set[str]] = {"help--heading"}
    BINDINGS: ClassVar[list[BindingType]] = [
        ("up", "scroll('up')", "up"),
        ("down", "scroll('down')", "down"),
        ("pageup", "scroll('page_up')", "page up"),
        ("pagedown", "scroll('page_down')", "page down"),
    ]

    def __init__(self, offered: Sequence[keys.Key] = keys.KEYS, here: Collection[str] = ()) -> None:
        super().__init__()
        near = [key for key in offered if key.id in here and key.keys]
        figures = [(title, [(*row, "") for row in rows]) for title, rows in _FIGURES.items()]
        rest = [key for key in offered if key not in near]
        self._sections: list[Section] = [*key_sections(near), *figures, *key_sections(rest), _TIPS]

    def compose(self) -> ComposeResult:
        yield Input(placeholder="Filter all keys and figures", compact=True)
        with VerticalScroll(id="help", can_focus=False) as pane:
            pane.border_title = "Help"
            yield Static()
        yield KeyFooter()

    def on_mount(self) -> None:
        self._show(self._sections)

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        words = event.value.casefold().split()
        found = (
            (title, [row for row in rows if all(word in f"{' '.join(row)} {title}".casefold() for word in words)])
            for title, rows in self._sections
        )
        self._show([(title, rows) for title, rows in found if rows])

    def _show(self, sections: Sequence[Section]) -> None:
        heading = self.get_component_rich_style("help--heading", partial=True)
        parts: list[Text | Table] = []
        for title, rows in sections:
            table = Table.grid(padding=(0, 2, 0, 0), expand=True)
            table.add_column(width=20, no_wrap=True, style="bold")
            table.add_column(ratio=1)
            for left, right, _ in rows:
                table.add_row(Text(left), Text(right))
            parts += [Text("\n" if parts else "").append(title, heading), table]
        pane = self.query_one("#help")
        pane.query_one(Static).update(Group(*parts) if parts else "No keys or figures match.")
        pane.scroll_home(animate=False)

    def action_scroll(self, where: str) -> None:
        getattr(self.query_one("#help"), f"scroll_{where}")(animate=False)
