"""Tests the list of places that matter and the tints of an answer, by themselves."""

from __future__ import annotations

from pathlib import Path

from cpuchat.compare.agreement import Agreement, AnswerAgreement, ScoredToken, UnlikelyWord
from cpuchat.compare.runner import SideAnswer
from cpuchat.tui.compare import agreement
from cpuchat.tui.compare.agreement import PlacesList, heat
from cpuchat.tui.markdown.message_view import AGREES
from tests.support.recorded import agreed_answer
from tests.support.snapshots import HostApp, snapshot

NAMES = ("Q8_0", "Q4_K_M")
TEXT = "Each weight is fetched once and used for every token."


def place(word: str, top: str, p_other: float) -> UnlikelyWord:
    at = TEXT.index(word)
    return UnlikelyWord(
        token=at, character=at, before=TEXT[:at], text=word, p=0.62, p_other=p_other, top=top, p_top=0.71
    )  # fmt: skip


def token(word: str, p_other: float, rank: int) -> ScoredToken:
    at = TEXT.index(word)
    return ScoredToken(at, at + len(word), 0.62, p_other, rank, 0.4, " x", 0.71)


def agreed(*places: UnlikelyWord, tokens: tuple[ScoredToken, ...] = ()) -> AnswerAgreement:
    return agreed_answer(1 - len(places) / 10, *places, tokens=tokens)


TOKENS = (token("fetched", 0.04, 3), token("used", 0.3, 2), token("every", 0.9, 1))
BOTH = Agreement(
    answers=(
        agreed(place("fetched", "read", 0.04), place("every", "all", 0.003), tokens=TOKENS),
        agreed(place("used", "kept", 0.08)),
    )
)


class ListApp(HostApp):
    """A host of a list, which keeps what that has posted."""

    def __init__(self, agreed: Agreement) -> None:
        self.listed = PlacesList(NAMES)
        super().__init__(self.listed, css=Path(agreement.__file__).with_name("compare.tcss").read_text())
        self.listed.show(agreed)
        self.posted: list[tuple[int, UnlikelyWord]] = []

    def on_mount(self) -> None:
        self.listed.focus()

    def on_places_list_chosen(self, event: PlacesList.Chosen) -> None:
        self.posted.append((event.side, event.place))


def test_a_content_in_parts_by_agreement() -> None:
    def parts(answer: SideAnswer) -> list[tuple[str, str]]:
        at, found = 0, []
        text = answer.content.lstrip("\n")
        for length, step in heat(BOTH, 0, answer):
            found.append((text[at : at + length], step))
            at += length
        assert at == len(text)
        return [(part, step) for part, step in found if step != AGREES]

    assert parts(SideAnswer(content=TEXT)) == [("fetched", "matters"), ("used", "close")]
    assert parts(SideAnswer(reasoning=TEXT[:25], content=TEXT[25:])) == [("used", "close")]


async def test_enter_posts_the_side_and_the_place() -> None:
    app = ListApp(BOTH)
    async with app.run_test(size=(100, 12)) as pilot:
        await pilot.pause()
        await snapshot(app, "agreement-places")
        await pilot.press("home", "down", "enter", "end", "enter")
        await pilot.pause()
        a, b = BOTH.answers
        assert app.posted == [(0, a.places[1]), (1, b.places[0])]


async def test_without_places_nothing_is_posted() -> None:
    app = ListApp(Agreement(answers=(agreed(), agreed())))
    async with app.run_test(size=(100, 12)) as pilot:
        await pilot.press("enter")
        await pilot.pause()
        assert app.posted == []
        assert app.listed.get_option_at_index(0).prompt == "No place matters."
        app.listed.show(Agreement(answers=(agreed(tokens=TOKENS[1:]), agreed())))  # "used" is a close second choice
        assert "□ at least 10 %" in str(app.listed.get_option_at_index(0).prompt)
