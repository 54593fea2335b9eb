"""The help screen: keys and figures."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from cpuchat.tui import keys
from cpuchat.tui.widgets.dismissable import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter

FIGURES = (
    ("tok/s", "decoding speed over the last second; once the answer is done, from its first token to its last"),
    ("first token", "time from sending to the first token"),
    ("prefill", "prompt tokens evaluated per second; reused tokens do not count"),
    ("reused", "prompt tokens found in the KV cache"),
    ("context", "tokens in the context; older messages that no longer fit stay in the chat"),
    ("private mem", "memory of the worker alone: KV cache, buffers, repacked weights"),
    ("shared mem", "weights mapped from the file; the kernel can drop and read them again"),
)
DRAFTING = (
    ("drafting", "drafters propose the next tokens; the model verifies all of them in one pass and keeps those that it "
     "would have sampled itself. The text is the same, only faster"),
    ("drafters", "suffix and lookup find repeated n-grams and cost next to nothing; a draft model is a smaller model "
     "with the same vocabulary"),
    ("depth", "tokens drafted per pass. Adaptive depth follows the measured cost of a pass, and is 0 where drafting "
     "would be slower than plain decoding"),
    ("acceptance", "share of drafted tokens that were accepted: in the last passes, and on average"),
    ("per pass", "tokens per pass; 1.0 is plain decoding"),
    ("by position", "acceptance of the first, second, … drafted token"),
    ("plain", "plain decoding speed here; 1.64× beside tok/s is the speed-up over it"),
    ("% time", "share of the decoding time spent waiting for drafts"),
)  # fmt: skip
MACHINE = (
    ("bandwidth", "weights and KV cache read per second, of the read bandwidth of these cores. ≈ is computed from the "
     "model; otherwise the name of the hardware counter"),
    ("peak", "read bandwidth of the cores in use, measured at the first load; ╎ marks it on the bar"),
    ("plain     ≤", "ceiling of plain decoding: peak bandwidth ÷ bytes per token"),
    ("drafting  ≤", "ceiling of drafting at the current acceptance and depth"),
    ("compute   ≤", "ceiling if only compute took time, from the prefill speed"),
    ("peak too low", "the bandwidth exceeds 105 % of the measured peak, because other programs ran during that "
     "measurement. `cpuchat probe` repeats it"),
    ("placement", "which cores compute, and where memory is allocated. Applying one measures short answers before "
     "and after, and keeps it if the gain is significant"),
)  # fmt: skip
SERVERS = (
    ("network", "part of the first token: connecting, and a round trip to the server"),
    ("queue", "part of the first token: waiting for other requests at the server"),
    ("running, queued", "requests that the server is answering and that wait, those of others too"),
    ("KV in use", "share of the server's KV cache that is in use, by all requests"),
    ("source", "who counted drafted tokens: the server for this answer; server-wide is for all of its requests"),
    ("≈", "beside tok/s and tokens: counted by the parts of text that came, each of which may hold several tokens"),
)
SPEECH = (
    ("first audio", "time from sending to the first sound; after token: from the first token"),
    ("RTF", "real-time factor: time to synthesize ÷ length of the sound; below 1 is faster than speech"),
    ("audio queued", "seconds of audio not yet played"),
    ("with speech", "decoding speed of the last answer that was read, of the last that was not"),
)
MACHINE_TITLE = "Memory bandwidth and ceilings"
SPEECH_TITLE = "Reading aloud"
_FIGURES = {
    "Figures": FIGURES,
    "Speculative decoding": DRAFTING,
    MACHINE_TITLE: MACHINE,
    "Models on servers": SERVERS,
    SPEECH_TITLE: SPEECH,
}
"""Blocks about figures, by title."""
_GOOD_TO_KNOW = (
    "Select with the mouse, Ctrl+C copies. Tab moves between panes; the arrow keys scroll the focused one. "
    "Esc closes every screen."
)


class HelpScreen(Dismissable[None]):
    """Generated from the key table. `left_out` are titles of blocks that are not shown."""

    CSS_PATH = "help.tcss"
    AUTO_FOCUS = "#help"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("help")
    KEYS: ClassVar = "help"

    def __init__(self, offered: Sequence[keys.Key] = keys.KEYS, left_out: Collection[str] = ()) -> None:
        super().__init__()
        self._offered = offered
        self._left_out = left_out

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help") as pane:
            pane.border_title = "Help"
            for group in dict.fromkeys(map(keys.heading, self._offered)):
                offered = [key for key in self._offered if keys.heading(key) == group]
                rows = [(keys.display_all(key.keys) or "palette", key.help) for key in offered]
                rows = list(dict.fromkeys(rows))  # rows that several screens share appear once
                if group == keys.APP:
                    rows.append(("Tab", "Focus the next pane"))
                yield Static(group, classes="heading")
                yield Static(self._rows(rows), classes="rows")
            for title, figures in _FIGURES.items():
                if title not in self._left_out:
                    yield Static(title, classes="heading")
                    yield Static(self._rows(list(figures)), classes="rows")
            yield Static("Tips", classes="heading")
            yield Static(_GOOD_TO_KNOW, classes="rows", markup=False)
        yield KeyFooter()

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
