"""The agreement of both sides on an answer: tints for the text, and the list of places that matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from textual.binding import BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from cpuchat.base.text import clean_line
from cpuchat.compare.agreement import MATTERS, Agreement, UnlikelyWord, spans
from cpuchat.compare.runner import SideAnswer
from cpuchat.present import compare
from cpuchat.tui import keys
from cpuchat.tui.markdown.message_view import AGREES, Spans


def heat(agreement: Agreement, side: int, answer: SideAnswer) -> Spans:
    """Return the content of an answer, without leading line breaks, in parts by whether the other would have written
    them."""
    begin = len(answer.reasoning) + len(answer.content) - len(answer.content.lstrip("\n"))
    size, at = len(answer.reasoning) + len(answer.content) - begin, 0
    parts: list[tuple[int, str]] = []
    for start, end, step in spans(agreement.answers[side].tokens, begin, begin + size):
        parts += [(start - at, AGREES), (end - start, step)]
        at = end
    return (*parts, (size - at, AGREES))


class PlacesList(OptionList):
    """Lists the places that matter, those of A's answer before those of B's."""

    BINDINGS: ClassVar[list[BindingType]] = [key.binding() for key in keys.KEYS if key.id == "places.continue"]
    KEYS: ClassVar = "places"
    DEFAULT_CSS = """
    PlacesList {
        border: round $border-blurred;
        border-title-color: $hint;
        border-title-style: none;
        border-subtitle-color: $hint;
        background: $background;
        height: auto;
        max-height: 12;
        padding: 0 1;
        scrollbar-size: 1 1;
        &:focus { border: round $border; border-title-color: $foreground; }
    }
    """

    class _OfPlace(Message):
        """`side` has written the answer with this place."""

        def __init__(self, places: PlacesList, side: int, place: UnlikelyWord) -> None:
            super().__init__()
            self.places, self.side, self.place = places, side, place

        @property
        def control(self) -> PlacesList:
            return self.places

    class Chosen(_OfPlace):
        """Go to this place (`place.character` of what was written, the reasoning first), and show both candidates."""

    class Continued(_OfPlace):
        """Continue the answer of `side` with the other model's token (`Comparison.continue_with`)."""

    def __init__(self, names: Sequence[str], *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self._names = names
        self._places: list[tuple[int, UnlikelyWord]] = []

    def show(self, agreement: Agreement) -> None:
        """List the places of this agreement."""
        self._places = []
        self.border_title = Content(clean_line(compare.agreement(agreement, self._names)))
        self.clear_options()
        self.add_options(self._listed(agreement))
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer to continue only where a place is listed."""
        return bool(self._places) if action == "continue" else super().check_action(action, parameters)

    def _listed(self, agreement: Agreement) -> Iterator[Option]:
        for side, answer in enumerate(agreement.answers):
            for place in answer.places:
                line = clean_line(compare.place(place, self._names[1 - side]))
                self._places.append((side, place))
                yield Option(Content(f"{'AB'[side]}  {line}"), id=str(len(self._places) - 1))
        if not self._places:
            min_share = f"{100 * MATTERS:.0f} %"
            is_close = any(token.step == "close" for answer in agreement.answers for token in answer.tokens)
            close = f"The other side gives a word marked ▯ at least {min_share}, though another word comes first."
            yield Option(close if is_close else "No place matters.", disabled=True)

    def candidates(self, side: int, place: UnlikelyWord) -> str:
        """Return both candidates of a place with what each side gives them, for a notice where the place is."""
        return clean_line(compare.candidates(place, self._names[side], self._names[1 - side]))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Chosen(self, *self._places[int(event.option.id or 0)]))

    def action_continue(self) -> None:
        """Continue with the other model's token at the marked place."""
        if self._places and self.highlighted is not None:
            self.post_message(self.Continued(self, *self._places[self.highlighted]))
