"""What comparing shows beside the stage: the answers of each side, the table, and the choice of the other side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import msgspec
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.compare.agreement import Agreement
from cpuchat.compare.comparison import Comparison
from cpuchat.compare.figures import figures_of
from cpuchat.compare.runner import PAIR, Side, SideAnswer, Turn
from cpuchat.models.catalog import load_catalog, match_local
from cpuchat.models.gguf.header import known_as
from cpuchat.models.library.places import LocalModel, is_same_model
from cpuchat.models.quantize.types import smaller_types
from cpuchat.present import answers, compare
from cpuchat.present.table import ListRow
from cpuchat.protocol.messages import (
    AnyEvent,
    Failed,
    GenerationFinished,
    LoadProgress,
    ModelLoaded,
    PrefillProgress,
    TextDelta,
)
from cpuchat.tui import keys
from cpuchat.tui.compare.agreement import heat
from cpuchat.tui.markdown.transcript import Transcript, TranscriptMessage
from cpuchat.tui.models.entries import ModelListSection, file_entries, list_rows
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.download_line import DownloadLine, QuantizeLine
from cpuchat.tui.widgets.model_list import ListScreen, ModelList


class SidePane(Transcript):
    """Shows what one side says. Only the side that writes is drawn again."""

    # Without those of the transcript in the footer, which has others here.
    BINDINGS: ClassVar[list[BindingType]] = [
        msgspec.structs.replace(key, footer=False).binding() for key in keys.KEYS if key.place == "transcript"
    ]

    def __init__(self, index: int, name: str) -> None:
        super().__init__(id=f"side-{'ab'[index]}")
        self.index = index
        self._label = clean_line(name)
        self.border_title = Content(f"{'AB'[index]}  {self._label}")
        self._written = False
        self._reading: PrefillProgress | None = None  # the newest event, of a prompt

    def show_turns(self, turns: Sequence[Turn], first: int | None = None) -> None:
        """Show complete turns from the end, or from index `first`."""
        messages: list[TranscriptMessage] = []
        top: int | None = None
        for index, turn in enumerate(turns):
            top = len(messages) if index == first else top
            messages.append(TranscriptMessage("user", "You", turn.prompt))
            if not turn.rounds:
                continue
            answer = turn.rounds[-1].answers[self.index]
            if answer.failed is not None and not answer.content:
                messages.append(self._failure(answer.failed))
                continue
            note = answers.summary(answer.timings, answer.stop_reason)
            messages.append(TranscriptMessage("assistant", self._label, answer.content, answer.reasoning, note))
        self.set_messages(messages, top)

    def show_agreement(self, agreement: Agreement, answer: SideAnswer) -> None:
        """Tint the last answer where the other side would have written something else."""
        if self._entries and self._entries[-1].open is None:
            entry = self._entries[-1]
            entry.message = dataclasses.replace(entry.message, heat=heat(agreement, self.index, answer))
            self._show_whole(entry)

    def go_to(self, share: float) -> None:
        """Scroll to this share (0-1) of the last answer, which stands in the middle then."""
        if self._entries:
            entry, start = self._entries[-1], self._entries.starts[-2]
            line = start + entry.content.start + round(share * len(entry.content))
            self._steer(min(max(0, line - self.size.height // 2), self.max_scroll_y))
            self.following = False

    def begin(self, before: Sequence[Turn], prompt: str) -> None:
        """Open the answer to `prompt`, after the turns `before`."""
        self.show_turns(before)
        self.add_message(TranscriptMessage("user", "You", prompt))
        self.begin_answer(self._label)
        self.set_pending("Waiting…")
        self._written = False

    def show_reading(self, left_s: float | None) -> None:
        """Say how much of the prompt is read, and that the rest takes `left_s` more seconds (None: not known)."""
        if self._reading is not None:
            self.set_pending(answers.prefill_progress(self._reading, left_s))

    def show_event(self, event: AnyEvent, left_s: float | None) -> None:
        """Show an event of this side; its prompt takes `left_s` more seconds."""
        self._reading = None
        match event:
            case TextDelta():
                self._written = True
                self.append(event.text, event.channel, event.drafter)
            case LoadProgress():
                self.set_pending(answers.load_progress(self._label, event))
            case PrefillProgress() if not self._written:
                self._reading = event
                self.show_reading(left_s)
            case ModelLoaded():
                self.set_pending("Loaded. Waiting…")
            case GenerationFinished():
                self.finish_answer(answers.summary(event.timings, event.stop_reason))
            case Failed():
                self.finish_answer()
                self.add_message(self._failure(event))

    def end(self) -> None:
        self.finish_answer("" if self._written else "not answered")

    @staticmethod
    def _failure(event: Failed) -> TranscriptMessage:
        text = "\n\n".join(filter(None, (event.message, event.hint)))
        return TranscriptMessage("notice", "Failed", text or "This side failed.")


_SETTINGS: tuple[tuple[str, dict[str, str]], ...] = (
    ("with drafters", {"drafters": "auto"}),
    ("KV cache q8_0", {"kv": "q8_0"}),
    ("flash attention off", {"flash-attn": "off"}),
)
_DOWNLOAD, _QUANTIZE = "download", "quantize"


def _settings_rows(path: Path) -> list[ListRow]:
    rows = [ListRow(key=f"settings {n}", name=name, note=known_as(path)) for n, (name, _) in enumerate(_SETTINGS)]
    return [ListRow(name="same file, other settings"), *rows]


class OtherSideScreen(ListScreen[Side | None], keys="other_side"):
    """Returns the other side, or None."""

    def __init__(self, services: Services, model: Path) -> None:
        super().__init__()
        self._services, self._path = services, model
        self._model: LocalModel | None = None
        self._repo = ""
        self.list_title = f"Compare {known_as(model)} with"

    def compose_below(self) -> ComposeResult:
        yield DownloadLine(self._services.downloading)
        yield QuantizeLine(self._services.quantizing)

    def on_mount(self) -> None:
        self.listed.show([ListRow(note="Reading…")])
        self._read()

    @work(exclusive=True, group="read")
    async def _read(self) -> None:
        try:
            self._model, self._repo, mark, rows = await run_in_daemon_thread(self._alternatives)
        except (CpuchatError, OSError) as error:
            mark, rows = "", [ListRow(note=str(error)), *_settings_rows(self._path)]
        self.listed.show(rows, mark)

    def _alternatives(self) -> tuple[LocalModel | None, str, str, list[ListRow]]:
        """Return the model, the repository with its other quantizations ("" for none), and the list with the key of
        what is selected first ("": the first line). Blocks."""
        library, path = self._services.library, self._path
        models = [model for model in library.local_models() if not model.damaged and model.kind == "model"]
        model = next((model for model in models if model.path == path), None) or library.at(path)
        rest = [other for other in models if other.path != path]
        same = [one for one in rest if model is not None and one.quantization != model.quantization
                and is_same_model(model, one)]  # fmt: skip
        listed = match_local(load_catalog(), model) if model is not None and model.source != "demo" else None
        repo = (model.repo if model is not None else "") or (listed.repos[0] if listed is not None else "")

        def of(heading: str, models: list[LocalModel]) -> list[ListRow]:
            sections = [ModelListSection(heading, file_entries(models))] if models else []
            return list_rows(sections, {}, None)

        rows, offered = of("other quantizations", same), list[ListRow]()
        if repo:
            offered.append(ListRow(key=_DOWNLOAD, name="Download another quantization", note=repo))
        if model is not None and any(kind.name == PAIR[1] for kind in smaller_types(model)):
            offered.append(ListRow(key=_QUANTIZE, name="Quantize it now", note="writes a smaller file"))
        rows += [ListRow(name="download or quantize"), *offered] if offered else []
        rows += _settings_rows(path)
        mark = next((f"local {one.path}" for one in same if one.quantization in PAIR), "")
        return model, repo, mark, [*rows, *of("other models", [one for one in rest if one not in same])]

    @on(ModelList.Chosen)
    @work(exclusive=True, group="choose")
    async def action_choose(self) -> None:
        key, navigation = self.marked_key, self._services.navigation
        chosen: Path | None = self._path
        changes = dict[str, str]()
        if key.startswith("settings "):
            changes = _SETTINGS[int(key.removeprefix("settings "))][1]
        elif key == _DOWNLOAD:
            chosen = await navigation.repository(self._repo)
        elif key == _QUANTIZE and self._model is not None:
            chosen = await navigation.quantize(self._model)
        else:
            chosen = Path(key.removeprefix("local ")) if key else None
        if chosen is not None:
            await self.dismiss_when_on_top(await run_in_daemon_thread(partial(Side.of, chosen, changes)))
        elif key:
            self._read()


class TablePane(VerticalScroll):
    """Shows all figures of the last prompt, and everything that is said about them."""

    BORDER_TITLE = "B against A"

    def __init__(self) -> None:
        self._table = Static()
        super().__init__(self._table, id="against")

    def begin(self) -> None:
        """Clear the table: another prompt is being answered."""
        self._table.update("No figures of this prompt yet.")
        self.border_subtitle = ""

    def show(self, comparison: Comparison, *keys: str) -> None:
        """Draw the table of the last turn."""
        if not comparison.turns or not comparison.turns[-1].rounds:
            return
        turn = comparison.turns[-1]
        figures = figures_of(turn.counted())
        rows = compare.rows(figures, [clean_line(name) for name in comparison.names])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        disturbed = figures.verdict.kind == "disturbed"
        above, below = ("".join(f"{clean_line(one)}\n" for one in part)
                        for part in compare.sentences(comparison, turn, *keys))  # fmt: skip
        text = Text(above, no_wrap=False)
        for number, (label, *cells) in enumerate(rows):
            aligned = [label.ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(cells, widths[1:], strict=True))]
            text.append("  ".join(aligned).rstrip() + "\n", "dim" if disturbed or not number else "")
        chosen = compare.choice(comparison, turn)
        text.append("\n".join((below, *map(clean_line, chosen[1]))) if chosen else below)
        text.rstrip()
        self._table.update(text)
        rounds = f"medians of {figures.n_rounds} rounds" if figures.medians else f"round {max(figures.n_rounds, 1)}"
        shown = turn.counted()[-1]
        self.border_subtitle = "stopped" if shown.stopped else "disturbed" if shown.disturbed else rounds
