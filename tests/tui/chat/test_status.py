"""Tests the line at the top: cores and memory policy."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.protocol.model_info import EngineInfo
from cpuchat.protocol.reasons import UNCALIBRATED, DraftsOff
from cpuchat.telemetry.speculation import DraftingFigures
from cpuchat.tui.chat.status import StatusLine
from tests.support.scripted_backend import MODEL
from tests.support.snapshots import HostApp


async def line(engine: EngineInfo | None, cpus: tuple[int, ...] = (), width: int = 120) -> str:
    status = StatusLine()
    async with HostApp(status).run_test(size=(width, 3)) as pilot:
        status.show_model(msgspec.structs.replace(MODEL, cpus=cpus))
        status.show_engine(engine)
        await pilot.pause()
        return str(status.render())


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (None, "8 cores · 0/8k ctx"),
        (EngineInfo(version="x", memory="local"), "8 cores · 0/8k ctx"),
        (EngineInfo(version="x", memory="interleave:0-1"), "8 cores · interleave 0-1 · 0/8k ctx"),
        (EngineInfo(version="x", memory="", memory_refused="not here"), "8 cores · memory policy rejected · 0/8k ctx"),
    ],
)
async def test_where_it_computes_and_keeps_its_memory(engine: EngineInfo | None, words: str) -> None:
    assert (await line(engine, cpus=tuple(range(8)))).rstrip().endswith(words)


async def test_threads_that_have_no_cores_of_their_own_are_called_so() -> None:
    assert "8 threads" in await line(None)


async def test_while_a_model_loads_nothing_of_the_one_before_is_shown() -> None:
    status = StatusLine()
    async with HostApp(status).run_test(size=(120, 3)) as pilot:
        status.show_model(MODEL)
        status.show_context(46)
        status.show_state("loading gemma-3 · preparing  12 %")
        await pilot.pause()
        assert str(status.render()).strip() == "cpuchat  loading gemma-3 · preparing  12 %"
        status.show_state("")
        assert "46/8k ctx" in str(status.render())


async def test_the_context_stays_when_there_is_no_room_for_more() -> None:
    text = await line(EngineInfo(version="x", memory="interleave:0-1"), cpus=tuple(range(8)), width=50)
    assert "interleave" not in text
    assert "0/8k ctx" in text


async def test_a_context_that_is_almost_full_is_marked() -> None:
    status = StatusLine()
    async with HostApp(status).run_test(size=(120, 3)) as pilot:
        status.show_model(MODEL)
        status.show_context(MODEL.n_ctx * 8 // 10 - 10)
        await pilot.pause()
        assert "! " not in str(status.render())
        status.show_context(MODEL.n_ctx * 8 // 10 + 1)
        assert "! " in str(status.render())


async def test_drafting_that_is_off_for_now_is_not_called_adaptive_alone() -> None:
    status = StatusLine()
    async with HostApp(status).run_test(size=(120, 3)) as pilot:
        status.show_model(msgspec.structs.replace(MODEL, draft="Qwen2.5-0.5B-Instruct", draft_quantization="Q8_0"))
        for drafting, words in (
            (DraftingFigures(wanted=True), "draft 0.5B Q8_0 · adaptive depth"),
            (DraftingFigures(wanted=True, depth=0, off=UNCALIBRATED), "draft 0.5B Q8_0 · adaptive depth"),
            (
                DraftingFigures(wanted=True, depth=0, off=DraftsOff("calibration skipped")),
                "draft 0.5B Q8_0 · drafts off",
            ),
            (DraftingFigures(wanted=True, depth=3), "draft 0.5B Q8_0 · adaptive depth 3"),
        ):
            status.show_drafting(drafting)
            await pilot.pause()
            assert words in str(status.render())
