"""A list of placements, and fields to edit one as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.tui.fields import field

if TYPE_CHECKING:
    from cpuchat.tune.placements import PlacementOption

_OWN = "Custom"
# Attribute of `PlacementSpec`, label, and the setting that it is.
_FIELDS = (
    ("cores", "cores", field("engine.cores")),
    ("draft_cores", "draft", field("speculation.draft_cores")),
    ("memory", "memory", field("engine.memory")),
    ("threads", "threads", field("engine.threads")),
)
_LABELS = {name: label for name, label, _ in _FIELDS}


class PlacementList(OptionList):
    """A list in which ↑ and ↓ select; Enter belongs to the screen."""


class PlacementsPane(Vertical):
    """Posts `Edited` when another placement is selected or typed. The fields are decisive; the list only fills
    them in.
    """

    class Edited(Message):
        """Another placement is selected or typed."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._offers: tuple[PlacementOption, ...] = ()
        self._in_use = PlacementSpec()
        self._filling = False

    def compose(self) -> ComposeResult:
        yield PlacementList(id="placements", compact=True)
        with Horizontal(id="fields"):
            for name, label in _LABELS.items():
                with Horizontal(classes="field"):
                    yield Static(label, classes="label", markup=False)
                    yield Input(id=f"field-{name}", compact=True, select_on_focus=True)
        yield Static(id="problem", classes="-empty", markup=False)
        yield Static(id="about", markup=False)

    def on_mount(self) -> None:
        self.border_title = "Placement"

    def offer(self, offers: Sequence[PlacementOption], in_use: PlacementSpec) -> None:
        """Show these placements and select the one in use; the fields keep what was typed."""
        typed = self.words() if self._offers else None
        keep = typed is not None and typed != self._words_of(self._in_use)
        self._offers, self._in_use = tuple(offers), in_use
        wanted = typed if keep and typed is not None else self._words_of(in_use)
        self._put(wanted)

    def reset(self, in_use: PlacementSpec) -> None:
        self._in_use = in_use
        self._put(self._words_of(in_use))

    def tell(self, text: Text | str) -> None:
        self.query_one("#about", Static).update(text)

    def show_problems(self, problems: dict[str, str]) -> None:
        """Show the problem of the focused field, else the first one."""
        for name in _LABELS:
            self.query_one(f"#field-{name}", Input).set_class(name in problems, "-invalid")
        line = self.query_one("#problem", Static)
        focused = self._focused_field
        first = focused if focused in problems else next(iter(problems), "")
        if first:
            line.update(f"! {_LABELS[first]}: {problems[first]}")
        else:
            line.update(f"{_LABELS[focused]}: {_rule(focused)}" if focused else "")
        line.set_class(bool(first), "-invalid")
        line.set_class(not first and not focused, "-empty")

    def words(self) -> dict[str, str]:
        return {name: self.query_one(f"#field-{name}", Input).value.strip() for name in _LABELS}

    @property
    def own_marked(self) -> bool:
        """Return whether the last line is selected: the fields hold none of the placements."""
        return self.query_one(PlacementList).highlighted == len(self._offers)

    def focus_words(self) -> None:
        self.query_one("#field-cores", Input).focus()

    def mark(self, spec: PlacementSpec) -> None:
        """Select a placement as the arrow keys would."""
        self._put(self._words_of(spec))
        self.post_message(self.Edited())

    @property
    def _focused_field(self) -> str:
        focused = self.screen.focused
        return (focused.id or "").removeprefix("field-") if isinstance(focused, Input) else ""

    @staticmethod
    def _words_of(spec: PlacementSpec) -> dict[str, str]:
        return {name: str(getattr(spec, name)) for name in _LABELS}

    def _put(self, words: dict[str, str]) -> None:
        self._fill(words)
        self._list(words)

    def _fill(self, words: dict[str, str]) -> None:
        with self.prevent(Input.Changed):
            for name in _LABELS:
                self.query_one(f"#field-{name}", Input).value = words[name]

    def _list(self, words: dict[str, str]) -> None:
        options = self.query_one(PlacementList)
        width = (options.size.width or self.size.width - 2) - 2  # where the scroll bar comes, if it comes
        with self.prevent(OptionList.OptionHighlighted):
            options.clear_options()
            options.add_options([Option(self._line(offer, width)) for offer in self._offers])
            known = [self._words_of(offer.spec) for offer in self._offers]
            mark = "●" if self._words_of(self._in_use) not in known else "○"
            options.add_option(Option(Text(f"{mark} {_OWN}", style="italic")))
            options.highlighted = known.index(words) if words in known else len(known)

    def _line(self, offer: PlacementOption, width: int) -> Text:
        in_use = self._words_of(offer.spec) == self._words_of(self._in_use)
        marks = " · ".join(filter(None, ("in use" if in_use else "", "recommended" if offer.recommended else "")))
        right = f"{offer.speed:>13}"
        room = max(width - len(right) - 2, 12)
        name = Text.assemble((offer.name, "bold" if in_use else ""), (f"  {marks}" if marks else "", "dim"))
        name.truncate(room, overflow="ellipsis", pad=True)
        return Text.assemble("● " if in_use else "○ ", name, right, no_wrap=True)

    def on_resize(self) -> None:
        if self._offers:
            self.call_after_refresh(lambda: self._list(self.words()))

    @on(OptionList.OptionHighlighted)
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        if event.option_index < len(self._offers):
            self._fill(self._words_of(self._offers[event.option_index].spec))
        self.post_message(self.Edited())

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_index == len(self._offers):
            self.focus_words()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        words = self.words()
        known = [self._words_of(offer.spec) for offer in self._offers]
        with self.prevent(OptionList.OptionHighlighted):
            self.query_one(PlacementList).highlighted = known.index(words) if words in known else len(known)
        self.post_message(self.Edited())

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        self.post_message(self.Edited())


def spec_of(words: dict[str, str]) -> tuple[PlacementSpec | None, dict[str, str]]:
    """Parse the fields; returns the placement, and what is wrong by field."""
    threads = next(field for name, _, field in _FIELDS if name == "threads")
    try:
        number = threads.parse(words["threads"] or "0")
    except ValueError as error:
        return None, {"threads": str(error)}
    return PlacementSpec(**{name: words[name] or "auto" for name in words if name != "threads"}, threads=number), {}


def _rule(name: str) -> str:
    return next(field.rule for known, _, field in _FIELDS if known == name)
