"""Tests the screen that quantizes, with the real llama.cpp behind it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from textual.widgets import Button

from cpuchat.base import paths
from cpuchat.hardware.topology import Instructions
from cpuchat.models.gguf.header import read_header
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import LocalModel
from cpuchat.models.quantize.make import QuantizeJob, QuantizeProgress
from cpuchat.models.quantize.types import quant_type
from cpuchat.models.synthetic.model import write_model
from cpuchat.present.models import TypePrediction
from cpuchat.tui.models.quantize import USUAL, QuantizeScreen
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from cpuchat.tui.widgets.model_list import Labelled
from tests.models.quantize.jobs import children
from tests.support.big_headers import big_header, hollow_file
from tests.support.chat_app import HANG_GUARD, SMALL, WIDE, RunningApp, running
from tests.support.models_screen import mark
from tests.support.shapes import TINY_LLAMA
from tests.support.shelf import MACHINE
from tests.support.snapshots import snapshot
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "models").mkdir()
    return folder


@pytest.fixture
def half(folder: Path) -> Path:
    return write_model(folder / "llama-F16.gguf", TINY_LLAMA, "F16")


def local(path: Path) -> LocalModel:
    """Return the model as the library lists it."""
    model = Library([path.parent], cache=path.parent / "no-hub").at(path)
    assert model is not None
    return model


class Opened:
    """The screen on top of the app, and short words for what tests do with it."""

    def __init__(self, app: RunningApp, model: LocalModel) -> None:
        self.app = app
        self.screen = QuantizeScreen(app.app.services, model)
        self.returned: asyncio.Future[Path | None] = asyncio.get_running_loop().create_future()
        app.app.push_screen(self.screen, self.returned.set_result)

    @property
    def listed(self) -> list[str]:
        return [row.key for row in self.screen.listed.rows]

    @property
    def out(self) -> Path:
        return Path(dict(self.screen.query_one(Labelled).rows)["writes"]).expanduser()

    @property
    def state(self) -> str:
        return str(self.screen.query_one("#list").border_subtitle)

    async def known(self, name: str) -> None:
        """Wait for the figures of one type, and mark it."""
        await self.app.until(lambda: name in self.screen.predictions)
        await mark(self.app, name)

    async def foreseen(self) -> None:
        """Wait for the figures of all listed types."""
        keys = {*self.listed} - {"more"}
        await self.app.until(lambda: keys == self.screen.predictions.keys() and not self.state)

    async def made(self) -> Path | None:
        """Wait until the screen is closed, and return what it returns."""
        return await asyncio.wait_for(self.returned, HANG_GUARD)


async def opened(app: RunningApp, model: LocalModel) -> Opened:
    await app.ready()
    screen = Opened(app, model)
    await app.until(lambda: app.app.screen is screen.screen)
    return screen


async def test_a_type_is_chosen_by_what_it_gives_and_made(half: Path) -> None:
    async with running(size=SMALL) as app:
        screen = await opened(app, local(half))
        await screen.foreseen()
        for size in (SMALL, WIDE):
            await app.pilot.resize_terminal(*size)
            for words in ("nearly lossless", "recommended"):
                assert words in app.screen_text
        best = screen.screen.predictions["Q8_0"]
        assert isinstance(best, TypePrediction)
        assert screen.listed == [*USUAL, "more"]
        (row,) = (row for row in screen.screen.listed.rows if "recommended" in row.name)
        assert row.key == "Q4_K_M" and row.columns is not None
        assert "×" in row.columns[3] or "tok/s" in row.columns[3]
        await screen.known("Q6_K")
        assert screen.out == half.with_name("llama-Q6_K.gguf")
        await screen.known("Q8_0")
        await app.press("enter")
        made = await screen.made()
        assert made == half.with_name("llama-Q8_0.gguf") and read_header(made).quantization == "Q8_0"
        await app.told("written")


async def test_it_asks_before_it_replaces_and_before_it_loses_quality_twice(half: Path) -> None:
    there = half.with_name("llama-Q4_K_M.gguf")
    there.write_bytes(b"mine")
    async with running() as app:
        screen = await opened(app, local(half))
        await screen.known("Q4_K_M")
        await app.press("enter")
        await app.opens(ConfirmScreen)
        await app.press("n")
        await app.opens(QuantizeScreen)
        assert there.read_bytes() == b"mine"
        await app.press("enter")
        await app.confirm()
        assert await screen.made() == there and read_header(there).quantization == "Q4_K_M"

        screen = await opened(app, local(there))
        await screen.known("Q3_K_M")
        assert not {"Q8_0", "Q4_K_M"} & {*screen.listed}  # only smaller ones
        assert not [row.key for row in screen.screen.listed.rows if "recommended" in row.name]
        shown = " ".join(app.screen_text.split())
        assert "requantized from" in shown
        await app.press("enter")
        await app.confirm()
        made = await screen.made()
        assert made is not None and read_header(made).quantization == "Q3_K_M"


@pytest.fixture
def large(folder: Path) -> Path:
    """Return a source that takes long enough to be observed."""
    return write_tiny_gguf(folder / "large-F32.gguf", n_embd=512, n_layer=1, n_ff=1536, n_head=8)


async def begun(app: RunningApp, model: Path) -> tuple[Opened, int]:
    """Open the screen while it writes an IQ4_XS file, and return the process, which is stopped midway."""
    screen = await opened(app, local(model))
    await screen.foreseen()
    await screen.known("IQ4_XS")
    before = set(children())
    await app.press("enter")
    await app.until(lambda: app.app.services.quantizing.progress is not None)
    (process,) = set(children()) - before
    os.kill(process, signal.SIGSTOP)
    return screen, process


async def test_stopping_asks_and_leaves_nothing(large: Path) -> None:
    async with running() as app:
        screen, _ = await begun(app, large)
        await app.press("f8")
        await app.opens(ConfirmScreen)
        button = app.app.screen.query_one("#choice-yes", Button)
        button.press()
        button.press()  # an answer given twice takes no other screen along
        await app.until(lambda: "partial file was deleted" in screen.state)
        assert app.app.screen is screen.screen
        assert [path.name for path in large.parent.iterdir()] == ["large-F32.gguf"]
        await app.press("escape")
        assert await screen.made() is None


async def test_the_work_goes_on_when_the_screen_is_left_and_ends_well_while_it_is_asked_whether_to_stop_it(
    large: Path,
) -> None:
    async with running() as app:
        screen, process = await begun(app, large)
        await app.press("escape")
        assert await screen.made() is None
        await app.shows("→ large-IQ4_XS.gguf")
        assert app.app.screen is app.chat
        again = await opened(app, local(large))
        await again.known("Q4_K_M")
        await app.press("enter")  # one at a time
        job = app.app.services.quantizing.job
        assert job is not None and job.type.name == "IQ4_XS"
        await app.press("f8")
        await app.opens(ConfirmScreen)
        os.kill(process, signal.SIGCONT)
        await app.until(lambda: app.app.services.quantizing.job is None)
        assert isinstance(app.app.screen, ConfirmScreen)  # what is asked stays until it is answered
        await app.press("y")
        made = await again.made()
        assert made is not None and made.name == "large-IQ4_XS.gguf" and read_header(made).quantization == "IQ4_XS"
        await app.closes()


async def test_leaving_the_app_asks_once_and_leaves_nothing(large: Path) -> None:
    async with running() as app:
        await begun(app, large)
        await app.press("ctrl+q")
        await app.opens(ConfirmScreen)
        await app.press("n")
        await app.opens(QuantizeScreen)
        assert app.app.services.quantizing.job is not None
        await app.press("ctrl+q")
        await app.opens(ConfirmScreen)
        app.press_last("ctrl+q")  # who asks twice to leave does not want to be asked
        await app.until(lambda: not app.app.is_running)
    assert [path.name for path in large.parent.iterdir()] == ["large-F32.gguf"]


async def test_an_unknown_model_is_told_and_what_lies_in_the_package_is_made_elsewhere(tmp_path: Path) -> None:
    unknown = write_tiny_gguf(tmp_path / "unknown.gguf")
    model = local(unknown)
    unknown.write_bytes(unknown.read_bytes().replace(b"llama", b"lhama"))
    demo = next(model for model in Library([]).local_models() if model.source == "demo")
    async with running() as app:
        screen = await opened(app, model)
        await screen.known("Q4_K_M")
        assert "lhama" in app.screen_text
        await app.press("enter")
        await app.until(lambda: "unknown model architecture" in app.notices[-1])
        await app.press("escape")
        screen = await opened(app, demo)
        await screen.known("Q4_K_M")
        assert screen.out.parent == paths.made_models_dir()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine other than the one that the tests run on."""
    cpu = Instructions(frozenset({"NEON", "DOTPROD", "MATMUL_INT8"}))
    monkeypatch.setattr("cpuchat.models.fit.engine_cpu", lambda _: cpu)
    monkeypatch.setattr("cpuchat.models.machine.this_machine", lambda *_, **__: MACHINE)


async def test_snapshots(tmp_path: Path, elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = hollow_file(tmp_path / "Qwen2.5-7B-Instruct-F16.gguf", big_header("7b", "F16"))
    async with running(size=SMALL) as app:
        screen = await opened(app, local(file))
        await screen.foreseen()
        await app.pilot.pause()
        await snapshot(app.app, "quantize-80x24")

        work = app.app.services.quantizing
        work.job = QuantizeJob(source=file, out=Path("Qwen2.5-7B-Instruct-Q8_0.gguf"), type=quant_type("Q8_0"))
        work.progress = QuantizeProgress(
            done_tensors=86, tensors=339, tensor="blk.7.ffn_down.weight", bytes_out=1_310_000_000,
            total_out=4_680_000_000, seconds_left=203,
        )  # fmt: skip
        work.changed.publish(None)
        await app.until(lambda: "27 %" in app.screen_text)
        await snapshot(app.app, "quantize-working-80x24")
        work.job = work.progress = None
