"""Tests the list widget: what is marked, what moves, what is drawn."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot

from cpuchat.present.table import ListRow
from cpuchat.tui.widgets.model_list import ModelList
from tests.support.snapshots import HostApp

ROWS = [
    ListRow(name="here"),
    ListRow("a", "●", "first", ("Q8_0", "1.6 GB", "loaded", "31.2 tok/s"), strong=True),
    ListRow("b", "!", "second", note="it is cut short", dim=True),
    ListRow(name="elsewhere"),
    ListRow("c", "◌", "third", ("Q4_K_M", "4.7 GB", "", "")),
]


def lines(listed: ModelList) -> list[str]:
    return [listed.render_line(y).text.rstrip() for y in range(listed.size.height)]


async def shown(pilot: Pilot[None], rows: list[ListRow], mark: str = "") -> ModelList:
    listed = pilot.app.query_one(ModelList)
    listed.show(rows, mark)
    await pilot.pause()
    return listed


async def test_headings_are_never_marked_and_a_second_click_chooses() -> None:
    chosen: list[ModelList.Chosen] = []

    def hook(message: object) -> None:
        if isinstance(message, ModelList.Chosen):
            chosen.append(message)

    async with HostApp(ModelList()).run_test(size=(70, 10), message_hook=hook) as pilot:
        listed = await shown(pilot, ROWS)
        assert listed.marked == "a" and not listed.moved
        visited = []
        for _ in range(4):
            listed.move(1)
            visited.append(listed.marked)
        assert visited == ["b", "c", "c", "c"]
        listed.move(-8)
        assert listed.marked == "a"
        await pilot.click(ModelList, offset=(5, 4))
        assert listed.marked == "c" and listed.moved and not chosen
        await pilot.click(ModelList, offset=(5, 3))  # a heading
        assert listed.marked == "c"
        await pilot.click(ModelList, offset=(5, 4))
        await pilot.pause()
        assert chosen


async def test_a_figure_that_comes_moves_nothing_else_and_narrow_lists_keep_names_and_fit() -> None:
    async with HostApp(ModelList()).run_test(size=(70, 10)) as pilot:
        before = lines(await shown(pilot, ROWS, mark="c"))
        faster = [*ROWS[:4], ListRow("c", "◌", "third", ("Q4_K_M", "4.7 GB", "fits", "≈204 tok/s"))]
        after = lines(await shown(pilot, faster, "c"))
        assert after[:4] == before[:4]
        assert after[4].startswith(before[4]) and after[4].endswith("≈204 tok/s")
        assert after[4].index("tok/s") == after[1].index("tok/s")
        evil = lines(await shown(pilot, [ListRow("x", "○", "a\x1b[2Jb\nc", ("Q\x07", "1 GB", "here", ""))]))
        assert evil[0].startswith("○ a␛[2Jb c") and "␇" in evil[0]

        rows = [*ROWS, ListRow("d", "◌", "fourth", ("Q4_K_M", "47 GB", "too large", ""), tag="code")]
        await pilot.resize_terminal(56, 10)
        listed = lines(await shown(pilot, rows))
        assert "fourth code" in listed[5] and "47 GB" in listed[5] and listed[5].rstrip().endswith("too large")
        name = "a-model-of-a-family-1.5b-instruct-"
        long = [ListRow(kind, "○", name + kind, (kind, "1.6 GB", "tight", "31 tok/s")) for kind in ("Q8_0", "Q4_K_M")]
        for width, told in ((30, ()), (44, ("31 tok/s",)), (60, ()), (80, ("31 tok/s",)), (100, ("31 tok/s",))):
            await pilot.resize_terminal(width, 12)
            listed = [*filter(None, lines(await shown(pilot, [*rows, *long])))]
            text = " ".join(" ".join(listed).split())
            assert text.count("tight") == 2 and "too large" in text and all(one in text for one in told)
            assert "first Q8_0" in text
            assert all(f"{name}{kind}" in text.replace(" ", "") for kind in ("Q8_0", "Q4_K_M"))
        wide = await shown(pilot, [ListRow("w", "○", name := "x" + "模型" * 40, ("Q8_0", "1 GB", "here", ""))])
        assert "".join(line.strip() for line in lines(wide)[:2]) == f"○ {name} Q8_0".removesuffix(" Q8_0")


async def test_the_mark_stays_in_view_but_a_figure_that_comes_does_not_scroll_back_to_it() -> None:
    def rows(state: str) -> list[ListRow]:
        columns = ("Q8_0", "1 GB", state, "")
        return [ListRow(name="all"), *(ListRow(str(n), "○", f"model {n}", columns) for n in range(30))]

    async with HostApp(ModelList(), css="ModelList { height: 6; }").run_test(size=(60, 10)) as pilot:
        listed = await shown(pilot, rows(""))
        listed.move(20)
        await pilot.pause()
        assert any("model 20" in line for line in lines(listed))
        listed.move(-20)
        await pilot.pause()
        assert lines(listed)[0].startswith("all")  # with the heading above it
        listed.scroll_to(y=21, animate=False)
        await pilot.pause()
        await shown(pilot, rows("fits"), mark="0")
        assert "model 20" in lines(listed)[0] and "fits" in lines(listed)[0]


@pytest.mark.parametrize("wide", [True, False])
async def test_a_paint_before_the_list_knows_its_new_width_draws_what_it_has(
    monkeypatch: pytest.MonkeyPatch, wide: bool
) -> None:
    monkeypatch.setattr(ModelList, "on_resize", lambda self: None)
    rows = [ListRow(str(n), "○", f"/a/folder{'/with/a/long/name' * 3}/{n}", ROWS[1].columns) for n in range(4)]
    before, after = ((44, 10), (120, 10)) if wide else ((120, 10), (44, 10))
    async with HostApp(ModelList()).run_test(size=before) as pilot:
        listed = await shown(pilot, rows)
        await pilot.resize_terminal(*after)
        await pilot.pause()
        assert "/a/folder" in lines(listed)[0] and len(listed.render_line(0).text) == after[0] - 1


async def test_figures_below_a_long_name_are_as_dim_as_those_beside_a_short_one() -> None:
    rows = [ListRow("a", "○", "short", ROWS[1].columns), ListRow("b", "○", "a long name" * 5, ROWS[1].columns)]
    async with HostApp(ModelList()).run_test(size=(60, 10)) as pilot:
        listed = await shown(pilot, rows)
        listed.move(1)  # neither line is looked at while it is selected
        beside = listed.render_line(0)
        listed.move(-1)
        below = next(line for y in range(1, 4) if "1.6 GB" in (line := listed.render_line(y)).text)
        colors = [next(s.style for s in line if "1.6 GB" in s.text) for line in (beside, below)]
        assert colors[0] == colors[1]
