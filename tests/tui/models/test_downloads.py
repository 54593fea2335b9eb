"""Tests downloads in the app: the line, the screen, the messages; with real transfers where they matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.screen import Screen
from textual.widgets import Button

from cpuchat.models.downloads.state import Download
from cpuchat.models.hub.client import Hub
from cpuchat.models.library.places import hub_cache
from cpuchat.tui.models.downloads import DownloadsScreen
from cpuchat.tui.models.repository import RepositoryScreen
from cpuchat.tui.widgets.dialogs import ChoiceScreen
from cpuchat.tui.widgets.download_line import DownloadLine
from tests.support.chat_app import SMALL, RunningApp, running
from tests.support.downloads import REPO, ShownDownloads, download, left_by_the_last_run, model
from tests.support.hub_server import Fault, Gate, HubServer
from tests.support.scripted_backend import ScriptedBackend, answer
from tests.support.shown_hub import ShownHub
from tests.support.snapshots import snapshot

Q4, Q5, Q6, Q8, F16 = (
    model(name, size) for name, size in (("Q4_K_M", 4_683_073_504), ("Q5_K_M", 5_444_831_232), ("Q6_K", 6_254_198_976),
                                         ("Q8_0", 8_098_525_888), ("F16", 15_237_853_184))
)  # fmt: skip
RUNS = download(Q4, 0.61, state="running", speed=38.1e6, seconds_left=47.4)
FULL = {
    "code": "disk_full",
    "message": "There is not enough room in ~/.cache/huggingface/hub: 10.7 GB are missing, 3.1 GB are free.",
    "hint": "Make room, then try again: the part that arrived is kept.",
}
ALL = (
    RUNS,
    download(Q8, 0.125, state="paused"),
    download(Q6, 0.4, state="waiting", attempt=3, retry_in=8, message="The hub answered 503."),
    download(Q5, 1.0, state="checking", checked=2_000_000_000),
    download(model("IQ4_XS", 4_218_473_440), 1.0, state="done", path="/models/qwen2.5-7b-iq4_xs.gguf"),
    download(F16, 0.3, state="failed", **FULL),
)


def line(app: RunningApp) -> DownloadLine:
    return app.app.screen.query_one(DownloadLine)


async def opened(app: RunningApp, mark: Download | None = None) -> DownloadsScreen:
    await app.ready()
    await app.press("ctrl+g")
    await app.until(lambda: isinstance(app.app.screen, DownloadsScreen))
    screen = app.app.screen
    assert isinstance(screen, DownloadsScreen)
    while mark is not None and (screen._marked is None or screen._marked.id != mark.id):
        await app.press("down")
    return screen


# The line


async def test_the_line_follows_the_downloads_in_any_width_and_is_told_of_changes_at_once() -> None:
    shown = ShownDownloads()
    async with running(downloads=shown.opener) as app:
        await app.ready()
        assert not line(app).display
        begun = app.app.services.downloading.start(REPO, "c" * 40, Q4)
        await app.until(lambda: line(app).display)
        for width in (24, 80, 200):
            await app.pilot.resize_terminal(width, 24)
            places: set[int] = set()
            for share, speed, left in (
                (0.0, 0.0, None),
                (0.099, 9.9e5, 99_999.0),
                (0.5, 38e6, 47.0),
                (1.0, 1.2e9, 0.0),
            ):
                shown.put(download(Q4, share, state="running", speed=speed, seconds_left=left, revision="c" * 40))
                await app.until(lambda share=share: f"{int(100 * share):>3d} %" in line(app).text)
                assert len(line(app).text) <= width
                places.add(line(app).text.index(" %"))
            assert len(places) == 1
        app.app.services.downloading.start(REPO, "c" * 40, Q5)
        await app.until(lambda: "Qwen2.5-7B-Instruct Q4_K_M +1" in line(app).text)
        app.app.services.downloading.cancel(shown.all()[1].id)

        told: list[str] = []
        app.app.services.downloading.changed.subscribe(app.chat, lambda d: told.append(d.state), immediate=True)
        shown.put(msgspec.structs.replace(begun, state="checking"))
        shown.put(msgspec.structs.replace(begun, state="failed", **FULL))
        assert told == ["checking", "failed"]
        await app.until(lambda: any("not enough room" in notice for notice in app.notices))
        assert "! Qwen2.5-7B-Instruct Q4_K_M  There is not enough room" in line(app).text
        shown.put(msgspec.structs.replace(begun, state="done", path="/x.gguf"))
        await app.until(lambda: not line(app).display)
        assert any("Qwen2.5-7B-Instruct Q4_K_M" in notice for notice in app.notices)


async def test_what_failed_in_an_earlier_run_is_no_news() -> None:
    failed = left_by_the_last_run(download(F16, 0.3, state="failed", **FULL))
    async with running(downloads=failed.opener) as app:
        await app.until(lambda: line(app).display)
        assert app.notices == []


async def settled(app: RunningApp, layouts: list[Screen[Any]]) -> None:
    """Wait until nothing is published or laid out any more."""
    await app.until(lambda: not app.app.services.downloading._timer.is_running)
    layouts.append(app.app.screen)
    while layouts:
        layouts.clear()
        await app.pilot.pause()


async def test_progress_is_gathered_and_never_causes_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = left_by_the_last_run(RUNS)
    async with running(hub=ShownHub((Q4, Q5)), downloads=shown.opener) as app:
        await app.ready()
        await app.until(lambda: line(app).display)
        told: list[Download] = []
        layouts: list[Screen[Any]] = []
        app.app.services.downloading.changed.subscribe(app.chat, told.append)
        refresh_layout = Screen._refresh_layout

        def counted(self: Screen[Any], *args: Any, **more: Any) -> None:
            layouts.append(self)
            refresh_layout(self, *args, **more)

        monkeypatch.setattr(Screen, "_refresh_layout", counted)
        for where in ("chat", "downloads", "repository"):
            if where == "downloads":
                await opened(app)
            elif where == "repository":
                await app.press("escape")
                app.app.push_screen(screen := RepositoryScreen(app.app.services, REPO))
                await app.until(lambda: screen._state is not None and screen._state.judged)
            shown.put(RUNS)
            await settled(app, layouts)
            told.clear()
            for percent in range(62, 93):
                shown.put(download(Q4, percent / 100 + 0.001, state="running", speed=4e7, seconds_left=9.0))
            await app.until(lambda: "92 %" in app.screen_text)
            await app.pilot.pause()
            assert len(told) == 1, where
            assert app.app.screen not in layouts, where


async def test_without_anything_left_no_manager_is_made() -> None:
    async with running(downloads=lambda changed: pytest.fail("a manager was made")) as app:
        await app.ready()
        await opened(app)
        assert "No downloads" in app.screen_text
        await app.press("d", "space", "enter", "escape")
        await app.until(lambda: app.app.screen is app.chat)


# The screen


async def test_space_pauses_d_removes_and_enter_retries_or_loads(tmp_path: Path, tiny_model: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_model.read_bytes()[:100])
    bad = download(model("Q3_K_M", 3_800_000_000), 1.0, state="done", path=str(cut))
    here = msgspec.structs.replace(ALL[4], path=str(tiny_model))
    shown = left_by_the_last_run(*ALL[:4], here, ALL[5], bad)
    async with running(downloads=shown.opener) as app:
        screen = await opened(app, RUNS)
        await app.press("space")
        await app.until(lambda: "paused" in app.screen_text.splitlines()[1])
        await app.press("space")
        await app.until(lambda: shown.asked == [(RUNS.id, "paused"), (RUNS.id, "running", "", "", "")])
        shown.asked.clear()
        asked: list[tuple[str, str, bool]] = []
        for pressed, size, cancelled in (
            (("escape",), "2.9 GB of 4.7 GB", None),
            (("enter",), "2.9 GB of 4.7 GB", (RUNS.id, "cancel", False)),
            (("right", "enter"), "1.0 GB of 8.1 GB", (ALL[1].id, "cancel", True)),
        ):
            await app.press("delete")
            await app.until(lambda: isinstance(app.app.screen, ChoiceScreen) and app.app.screen.focused is not None)
            assert isinstance(app.app.screen.focused, Button) and size in app.screen_text
            await app.press(*pressed)
            await app.until(lambda: app.app.screen is screen)
            asked += [cancelled] if cancelled else []
            assert shown.asked == asked
            left = [download.id for download in shown.all()]
            assert [one.id not in left for one in ALL[:2]] == [one.id in [cut[0] for cut in asked] for one in ALL[:2]]

        screen.listed.mark(ALL[5].id)
        await app.until(lambda: "10.7 GB are missing" in app.screen_text)
        await app.press("enter")
        await app.until(lambda: next(one for one in shown.all() if one.id == ALL[5].id).state == "running")
        screen.listed.mark(bad.id)
        await app.press("enter")
        await app.until(lambda: any("cut" in notice for notice in app.notices))
        assert app.app.screen is screen and len(app.backend.loads) == 1
        await app.press("d")  # what is done leaves the list without a question
        await app.until(lambda: screen._marked is not None and screen._marked.id == ALL[5].id)
        assert shown.asked[-1] == (bad.id, "cancel", False)
        screen.listed.mark(here.id)
        await app.press("enter")
        await app.until(lambda: len(app.backend.loads) == 2)
        assert app.backend.loads[1][0] == tiny_model
        assert app.app.screen is app.chat


# Real transfers

NAME = "tiny-F32.gguf"
AT = 200_000


async def started(app: RunningApp, hub: HubServer, content: Path, gate: Gate | None = None) -> Download:
    """Start the download of `content` from the server, which stops at the gate."""
    await app.ready()
    hub.add("tiny/tiny-GGUF", {NAME: content})
    repository = Hub().repository("tiny/tiny-GGUF")
    if gate is not None:
        hub.fault("tiny/tiny-GGUF", NAME, Fault(gate=gate))
    return app.app.services.downloading.start(repository.id, repository.revision, repository.models[0])


def one(app: RunningApp) -> Download:
    (download,) = app.app.services.downloading.all()
    return download


def arrived(app: RunningApp) -> Callable[[], bool]:
    return lambda: one(app).done > 0


def went_on(hub: HubServer) -> bool:
    """Return whether the last request asked for what was missing, not for all of it."""
    last = [request for request in hub.requests if request.file == NAME and request.status == 206][-1]
    return int(last.range.removeprefix("bytes=").partition("-")[0]) > 0


async def test_a_chat_goes_on_while_a_model_comes_which_is_paused_resumed_and_loaded(
    hub_server: HubServer, tiny_model: Path
) -> None:
    gate = Gate(at=AT)
    backend = ScriptedBackend([answer("Still talking.")])
    async with running(backend) as app:
        await started(app, hub_server, tiny_model, gate)
        await app.until(arrived(app))
        await app.send("Hello")
        assert "Still talking." in app.screen_text
        await app.until(lambda: "/474 kB" in line(app).text)
        await opened(app)
        await app.press("space")
        await app.until(lambda: one(app).state == "paused")
        gate.open()
        await app.press("space")
        await app.until(lambda: one(app).state == "done")
        assert went_on(hub_server)
        await app.until(lambda: any("tiny F32" in notice for notice in app.notices))
        await app.press("enter")
        await app.until(lambda: len(app.backend.loads) == 2)
        path = app.backend.loads[1][0]
        assert path.is_relative_to(hub_cache()) and path.read_bytes() == tiny_model.read_bytes()


async def test_the_next_run_goes_on_where_this_one_ended(hub_server: HubServer, tiny_model: Path) -> None:
    gate = Gate(at=AT)
    async with running() as app:
        await started(app, hub_server, tiny_model, gate)
        await app.until(arrived(app))
    gate.open()
    async with running() as app:
        await app.until(lambda: app.app.services.downloading.all() and one(app).state == "done")
        assert Path(one(app).path).read_bytes() == tiny_model.read_bytes()
    assert went_on(hub_server)


# Pictures


async def test_snapshots() -> None:
    shown = left_by_the_last_run(*ALL)
    async with running(ScriptedBackend([answer("Reading is one product.")]), size=SMALL, downloads=shown.opener) as app:
        app.prompt.cursor_blink = False
        await app.ready()
        await app.until(lambda: line(app).display)
        await app.pilot.pause()
        await snapshot(app.app, "chat-downloading-80x24")
        screen = await opened(app, ALL[5])
        await app.until(lambda: screen._marked is not None)
        await app.pilot.pause()
        await snapshot(app.app, "downloads-80x24")
        await app.press("delete")
        await app.until(lambda: isinstance(app.app.screen, ChoiceScreen) and app.app.screen.focused is not None)
        await app.pilot.pause()
        await snapshot(app.app, "downloads-cancel-80x24")
