"""The agreement of both sides on an answer: tints for the text, and the list of places that matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from cpuchat.base.text import clean_line
from cpuchat.compare.agreement import MATTERS, Agreement, UnlikelyWord, spans
from cpuchat.compare.runner import SideAnswer
from cpuchat.present import compare
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

    KEYS: ClassVar = "places"

    class Chosen(Message):
        """Go to this place (`place.character` of what was written, the reasoning first) in the answer of `side`."""

        def __init__(self, side: int, place: UnlikelyWord) -> None:
            super().__init__()
            self.side, self.place = side, place

    def __init__(self, names: Sequence[str], *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self._names = names
        self._places: list[tuple[int, UnlikelyWord]] = []

    def show(self, agreement: Agreement) -> None:
        """List the places of this agreement."""
        self._places = []
        self.border_title = Content(clean_line(compare.agreement(agreement, self._names)))
        self.clear_options()
        for side, answer in enumerate(agreement.answers):
            for place in answer.places:
                line = clean_line(compare.place(place, self._names[1 - side]))
                self.add_option(Option(Content(f"{'AB'[side]}  {line}"), id=str(len(self._places))))
                self._places.append((side, place))
        if not self._places:
            min_share = f"{100 * MATTERS:.0f} %"
            is_close = any(token.step == "close" for answer in agreement.answers for token in answer.tokens)
            close = f"The other side gives a word marked □ at least {min_share}, though another word comes first."
            self.add_option(Option(close if is_close else "No place matters.", disabled=True))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Chosen(*self._places[int(event.option.id or 0)]))
