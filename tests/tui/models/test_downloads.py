"""Tests downloads in the app: the line, the list, the messages; with real transfers where they matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.screen import Screen

from cpuchat.models.downloads.state import Download
from cpuchat.models.hub.client import Hub
from cpuchat.tui.models.repository import RepositoryScreen
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.widgets.dialogs import ChoiceScreen
from cpuchat.tui.widgets.download_line import DownloadLine
from tests.support.chat_app import SMALL, RunningApp, running
from tests.support.downloads import REPO, ShownDownloads, download, left_by_the_last_run, model
from tests.support.hub_server import Fault, Gate, HubServer
from tests.support.models_screen import mark, marked, opened_shelf
from tests.support.scripted_backend import ScriptedBackend, answer
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


def text(app: RunningApp) -> str:
    return line(app).line(line(app).size.width).plain


async def opened(app: RunningApp) -> ModelsScreen:
    await app.ready()
    await app.press("ctrl+g")
    return await app.opens(ModelsScreen)


async def select(app: RunningApp, download: Download) -> None:
    await mark(app, f"download {download.id}")


async def asked_to_cancel(app: RunningApp) -> None:
    await app.press("delete")
    question = await app.opens(ChoiceScreen)
    await app.until(lambda: question.focused is not None)


async def test_the_line_follows_the_downloads_in_any_width_and_is_told_of_changes_at_once() -> None:
    shown = ShownDownloads()
    async with running(downloads=shown.opener) as app:
        await app.ready()
        assert not line(app).display
        downloading = app.app.services.downloading
        begun = downloading.start(REPO, "c" * 40, Q4)
        await app.until(lambda: line(app).display)
        for width in (24, 80, 200):
            await app.pilot.resize_terminal(width, 24)
            places: set[int] = set()
            for share, speed, left in ((0.0, 0.0, None), (0.099, 9.9e5, 99_999.0), (1.0, 1.2e9, 0.0)):
                shown.put(download(Q4, share, state="running", speed=speed, seconds_left=left, revision="c" * 40))
                await app.until(lambda share=share: f"{int(100 * share):>3d} %" in text(app))
                assert len(text(app)) <= width
                places.add(text(app).index(" %"))
            assert len(places) == 1
        downloading.start(REPO, "c" * 40, Q5)
        await app.until(lambda: "Qwen2.5-7B-Instruct Q4_K_M +1" in text(app))
        downloading.cancel(shown.all()[1].id)

        told: list[str] = []
        downloading.changed.subscribe(app.chat, lambda d: told.append(d.state), immediate=True)
        shown.put(msgspec.structs.replace(begun, state="checking"))
        shown.put(msgspec.structs.replace(begun, state="failed", **FULL))
        assert told == ["checking", "failed"]
        await app.told("not enough room")
        assert "! Qwen2.5-7B-Instruct Q4_K_M  There is not enough room" in text(app) and "Ctrl+G more" in text(app)
        await app.app.push_screen(RepositoryScreen(app.app.services, REPO))  # which has no such key
        await app.until(lambda: line(app).display and "There is not enough room" in text(app))
        assert "Ctrl+G" not in text(app)
        shown.put(msgspec.structs.replace(begun, state="done", path="/x.gguf"))
        await app.until(lambda: not line(app).display)
        await app.told("Qwen2.5-7B-Instruct Q4_K_M")
        assert "Ctrl+G" not in app.notices[-1]
        await app.press("escape")
        shown.put(msgspec.structs.replace(begun, state="running"))
        shown.put(msgspec.structs.replace(begun, state="done", path="/x.gguf"))
        await app.told("Qwen2.5-7B-Instruct Q4_K_M. Ctrl+G")


async def test_what_failed_in_an_earlier_run_is_no_news() -> None:
    failed = left_by_the_last_run(download(F16, 0.3, state="failed", **FULL))
    async with running(downloads=failed.opener) as app:
        await app.until(lambda: line(app).display)
        assert app.notices == []


async def test_progress_is_gathered_and_never_causes_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = left_by_the_last_run(RUNS)
    layouts: list[Screen[Any]] = []
    refresh_layout = Screen._refresh_layout

    def counted(self: Screen[Any], *args: Any, **more: Any) -> None:
        layouts.append(self)
        refresh_layout(self, *args, **more)

    monkeypatch.setattr(Screen, "_refresh_layout", counted)
    async with running(downloads=shown.opener) as app:
        await opened(app)
        await select(app, RUNS)
        while layouts:
            layouts.clear()
            await app.pilot.pause()
        told: list[Download] = []
        app.app.services.downloading.changed.subscribe(app.chat, told.append)
        for percent in range(62, 93):
            shown.put(download(Q4, percent / 100 + 0.001, state="running", speed=4e7, seconds_left=9.0))
        await app.shows("92 %")
        assert len(told) == 1 and app.app.screen not in layouts


async def test_without_anything_left_no_manager_is_made() -> None:
    async with running(downloads=lambda changed: pytest.fail("a manager was made")) as app:
        await opened(app)
        await app.press("ctrl+g")
        await app.told("No downloads")
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)


async def test_enter_pauses_resumes_and_retries_del_cancels_and_what_came_is_selected(
    tmp_path: Path, tiny_model: Path
) -> None:
    (cut := tmp_path / "cut.gguf").write_bytes(tiny_model.read_bytes()[:100])
    shown = left_by_the_last_run(*ALL[:4], ALL[5])
    async with running(downloads=shown.opener, folders=(tmp_path, tiny_model.parent)) as app:
        screen = await opened(app)
        await app.until(lambda: marked(app) == f"download {ALL[5].id}")  # the newest that is left
        shown.put(msgspec.structs.replace(RUNS, state="failed", **FULL))
        await app.press("ctrl+g")
        await app.until(lambda: marked(app) == f"download {RUNS.id}")  # what was told last
        shown.put(RUNS)
        await app.press("enter")
        await app.until(lambda: (screen.listed.rows[1].columns or ())[2:3] == ("paused",))
        await app.press("enter")
        await app.until(lambda: shown.asked == [(RUNS.id, "paused"), (RUNS.id, "running", "", "", "")])
        shown.asked.clear()
        asked: list[tuple[str, str, bool]] = []
        for one, pressed, size, cancelled in (
            (RUNS, ("escape",), "2.9 GB of 4.7 GB", None),
            (RUNS, ("enter",), "2.9 GB of 4.7 GB", (RUNS.id, "cancel", False)),
            (ALL[1], ("right", "enter"), "1.0 GB of 8.1 GB", (ALL[1].id, "cancel", True)),
        ):
            await select(app, one)
            await asked_to_cancel(app)
            assert size in app.screen_text
            await app.press(*pressed)
            await app.until(lambda: app.app.screen is screen)
            asked += [cancelled] if cancelled else []
            assert shown.asked == asked
        assert not {RUNS.id, ALL[1].id} & {download.id for download in shown.all()}

        await select(app, ALL[5])
        await app.shows("10.7 GB are missing")
        await app.press("enter")
        await app.until(lambda: next(one for one in shown.all() if one.id == ALL[5].id).state == "running")
        for path in (cut, tiny_model):
            shown.put(msgspec.structs.replace(ALL[5], state="running"))
            await select(app, ALL[5])
            shown.put(msgspec.structs.replace(ALL[5], state="done", path=str(path)))
            await app.until(lambda path=path: marked(app) == f"local {path}")
            await app.press("enter")
            if path == cut:
                await app.told("cut")
                assert app.app.screen is screen and len(app.backend.loads) == 1
        assert (await app.loaded(2))[0] == tiny_model and app.app.screen is app.chat


async def test_the_next_run_goes_on_where_this_one_ended(hub_server: HubServer, tiny_model: Path) -> None:
    hub_server.add("tiny/tiny-GGUF", {"tiny-F32.gguf": tiny_model})
    repository = Hub().repository("tiny/tiny-GGUF")
    hub_server.fault("tiny/tiny-GGUF", "tiny-F32.gguf", Fault(gate=(gate := Gate(at=200_000))))
    async with running() as app:
        await app.ready()
        downloading = app.app.services.downloading
        downloading.start(repository.id, repository.revision, repository.models[0])
        await app.until(lambda: downloading.all()[0].done > 0)
    gate.open()
    async with running() as app:
        downloads = app.app.services.downloading.all
        await app.until(lambda: [one.state for one in downloads()] == ["done"])
        assert Path(downloads()[0].path).read_bytes() == tiny_model.read_bytes()
    resumed = [request for request in hub_server.requests if request.file == "tiny-F32.gguf" and request.status == 206]
    assert int(resumed[-1].range.removeprefix("bytes=").partition("-")[0]) > 0  # what was missing, not all of it


async def test_snapshots(tmp_path: Path) -> None:
    shown = left_by_the_last_run(*ALL)
    async with running(ScriptedBackend([answer("Reading is one product.")]), size=SMALL, downloads=shown.opener) as app:
        app.prompt.cursor_blink = False
        await app.ready()
        await app.until(lambda: line(app).display)
        await app.pilot.pause()
        await snapshot(app.app, "chat-downloading-80x24")
        await opened_shelf(app, tmp_path)
        await select(app, ALL[5])
        await asked_to_cancel(app)
        await snapshot(app.app, "downloads-cancel-80x24")
