from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from cpuchat.base import paths
from cpuchat.base.errors import AccessDenied
from cpuchat.models.hub.repository import Repository
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import hub_cache
from cpuchat.models.machine import Machine
from cpuchat.tui.chat.screen import ChatScreen
from cpuchat.tui.models.repository import RepositoryScreen, RepositoryState
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from tests.support.chat_app import SMALL, RunningApp, running
from tests.support.costs import reading
from tests.support.downloads import COMMIT, REPO, ShownDownloads, download, model
from tests.support.edited_gguf import edited
from tests.support.hub_server import HubServer
from tests.support.shown_hub import DRAFT_REPO, ShownHub
from tests.support.snapshots import snapshot

TINY = "tiny/tiny-GGUF"
MACHINE = Machine(
    available=13_400_000_000, total=16_000_000_000, peak=51e9, peak_source="measured, 8 cores",
    profile=reading(0.7 * 51e9), source="probe of 8 cores",
)  # fmt: skip
MODELS = (
    model("IQ4_XS", 4_218_473_440),
    model("Q4_K_M", 4_683_073_504),
    model("Q6_K", 6_254_198_976),
    model("Q8_0", 8_098_525_888),
    model("F16", 15_237_853_184, parts=4),
    model("F32", 22_856_779_776, parts=8, complete=False),
    model("f16", 1_354_163_072, name="mmproj-Qwen2.5-7B-Instruct", kind="projector"),
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, without_amx: None) -> None:
    """Simulate a machine that is the same everywhere."""
    monkeypatch.setattr("cpuchat.models.machine.this_machine", lambda settings, *, loaded=None: MACHINE)


async def opened(app: RunningApp, repo: str = REPO, **more: Any) -> RepositoryScreen:
    """Open the screen and wait until the header of the marked model is read."""
    await app.ready()
    screen = RepositoryScreen(app.app.services, repo, **more)
    app.app.push_screen(screen, lambda path: app.chat.session.load(path) if path is not None else None)
    await app.until(lambda: screen.problem is not None or (screen.state is not None and screen.state.judged))
    return screen


def lines(app: RunningApp, text: str) -> list[str]:
    """Return the lines of the list."""
    return [line for row in app.screen_text.splitlines() if text in (line := row[:100])]


async def test_what_is_here_partial_gated_unsupported_or_broken_is_told(
    hub_server: HubServer, tmp_path: Path, tiny_model: Path
) -> None:
    content = tiny_model.read_bytes()
    commit = hub_server.add(TINY, {"tiny-Q4_K_M.gguf": tiny_model, "F32/tiny-F32.gguf": tiny_model})
    here = hub_cache() / "models--tiny--tiny-GGUF/snapshots" / commit / "F32/tiny-F32.gguf"
    here.parent.mkdir(parents=True)
    here.write_bytes(content)
    left = content + bytes(1)
    hub_server.add("tiny/left-GGUF", {"tiny-Q8_0.gguf": left})
    part = hub_cache() / f"models--tiny--left-GGUF/blobs/{hashlib.sha256(left).hexdigest()}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(left[: len(left) // 2])
    hub_server.add("tiny/gated-GGUF", {"tiny-Q8_0.gguf": tiny_model}, gated=True)
    new = edited(tiny_model, tmp_path / "new.gguf", {"general.architecture": "llama77"}).read_bytes()
    hub_server.add("tiny/new-GGUF", {"new-Q8_0.gguf": new, "new-Q4_0.gguf": new + bytes(9)})
    evil = {"license": "\x1b[2Jmit", "base_model": "a\x1b]0;b"}
    hub_server.add(
        "tiny/evil-GGUF", {"tiny-Q8_0.gguf": b"GGUF" + bytes(1000), "tiny-F32.gguf": tiny_model}, cardData=evil
    )
    async with running(size=SMALL) as app:
        app.app.services.library = Library()
        await opened(app, "tiny/left-GGUF")
        assert lines(app, "paused 50 %") or lines(app, "paused 49 %")
        assert "% downloaded," in app.screen_text.replace("\n", " ")
        await app.press("escape")

        await opened(app, "tiny/gated-GGUF")
        assert lines(app, "no access") and "gated" in app.screen_text
        await app.press("enter")
        await app.told(f"{hub_server.endpoint}/tiny/gated-GGUF", "hf auth login")
        await app.press("escape")

        await opened(app, "tiny/evil-GGUF")
        assert lines(app, "≈ fits") and "problem" in app.screen_text and "\x1b" not in app.screen_text
        await app.press("escape")

        await opened(app, "tiny/new-GGUF")
        assert lines(app, "unsupported")
        assert "needs a newer engine" in app.screen_text.replace("\n", " ")
        app.app.simulate_key("down")
        app.app.simulate_key("enter")  # before the header of this one is read
        await app.opens(ConfirmScreen)
        assert "llama77" in app.screen_text
        await app.press("escape")
        await app.opens(RepositoryScreen)
        assert not app.app.services.downloading.all()
        await app.press("escape")

        await opened(app, TINY)
        assert any(line.startswith("│ ○") for line in lines(app, "downloaded"))
        await app.press("enter")
        assert (await app.loaded(2))[0] == here and app.app.screen is app.chat


async def test_offline_and_unknown_are_told_in_place_and_asked_again(
    hub_server: HubServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as app:
        screen = await opened(app, TINY)
        assert screen.problem is not None and screen.problem.code == "not_on_hub"
        assert "! " in app.screen_text and "what to do" in app.screen_text
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        await app.press("ctrl+r")
        await app.until(lambda: screen.problem is not None and screen.problem.code == "hub_offline")
        monkeypatch.delenv("HF_HUB_OFFLINE")
        hub_server.add(TINY, {"tiny-Q8_0.gguf": tiny_model})
        await app.press("enter", "space", "ctrl+r")
        await app.until(lambda: lines(app, " Q8_0 "))


CATALOG = f"""
[[model]]
id = "big"
name = "big 7b"
family = "Test"
params = 7.6
repos = ["{REPO}"]
drafts = ["small"]

[[model]]
id = "small"
name = "big 0.5b"
family = "Test"
params = 0.5
repos = ["{DRAFT_REPO}"]
sizes = {{ Q8_0 = 0.53 }}
"""


async def test_the_draft_model_is_in_the_sum(machine: None) -> None:
    paths.user_catalog().parent.mkdir(parents=True)
    paths.user_catalog().write_text(CATALOG)
    async with running(hub=ShownHub(MODELS)) as app:
        screen = await opened(app)
        assert "draft 0." in app.screen_text and "big 0.5b Q8_0" in app.screen_text
        known = {one.model.quantization: one.prediction for one in screen.entries if one.prediction is not None}
        assert known["Q8_0"].draft_need is not None
        # A draft model that is not here makes no model too large.
        assert known["F16"].draft_need is None and known["F16"].verdict == "too large"


async def test_what_is_marked_is_read_downloaded_paused_and_resumed(machine: None) -> None:
    hub, shown = ShownHub(MODELS), ShownDownloads()
    async with running(size=SMALL, hub=hub, downloads=shown.opener) as app:
        screen = await opened(app)
        assert hub.read == ["Q4_K_M"]
        assert " fits " in lines(app, " Q4_K_M ")[0] and "≈ fits" not in lines(app, " Q4_K_M ")[0]
        assert "≈ fits" in lines(app, " Q8_0 ")[0] and "≈ too large" in lines(app, " F16 ")[0]
        await app.press("down", "down")
        await app.until(lambda: hub.read[-1] == "Q8_0" and "≈ fits" not in lines(app, " Q8_0 ")[0])

        await app.press("up", "enter")
        await app.until(lambda: len(shown.all()) == 1)
        order = shown.all()[0].order
        assert (order.repo, order.revision, order.model.quantization) == (REPO, COMMIT, "Q6_K")
        shown.put(download(MODELS[2], 0.61, state="checking", checked=2_000_000_000))
        await app.until(lambda: "verifying" in lines(app, " Q6_K ")[0])
        await app.press("up")
        await app.pilot.pause()
        await snapshot(app.app, "repository-80x24")
        await app.press("down")
        shown.put(download(MODELS[2], 0.5, state="running"))
        await app.until(lambda: "50 %" in lines(app, " Q6_K ")[0])
        await app.press("space")
        await app.until(lambda: "paused" in lines(app, " Q6_K ")[0])
        await app.press("enter")
        await app.until(lambda: shown.all()[0].state == "running")
        await app.press("enter")
        await app.told("Space pauses it")
        await app.press("pagedown")
        assert screen.marked is not None and screen.marked.model.kind == "projector"
        await app.press("enter")
        await app.until(lambda: len(shown.all()) == 2)
        shown.put(download(MODELS[6], 1.0, state="done", path="/models/mmproj.gguf"))
        await app.until(lambda: "downloaded" in lines(app, "mmproj")[0])
        await app.press("enter")  # no model to load
        assert app.app.screen is screen

        await app.pilot.resize_terminal(44, 20)
        await app.press("pageup", "pageup")
        await app.until(lambda: "base model" not in app.screen_text)
        await app.press(*["shift+down"] * 8)
        await app.until(lambda: "base model" in app.screen_text)
        await app.press("escape")
        app.app.services.hub = ShownHub(())  # type: ignore[assignment]
        app.app.push_screen(RepositoryScreen(app.app.services, REPO))
        await app.shows("no GGUF files")
        await app.press("enter", "down", "space", "escape")
        await app.closes()


async def test_leaving_while_what_was_chosen_is_read_ends_nothing_else(machine: None) -> None:
    hub, reading, read = ShownHub(MODELS), threading.Event(), threading.Event()
    async with running(hub=hub) as app:
        screen = await opened(app)
        header, hub.header = hub.header, lambda *wanted: (reading.set(), read.wait(), header(*wanted))[-1]
        await app.press("down", "enter")
        await app.until(reading.is_set)
        await app.press("enter", "escape")
        read.set()
        await app.until(lambda: not screen.is_attached and isinstance(app.app.screen, ChatScreen))
        await app.press("h", "i")
        assert "hi" in app.screen_text


async def test_the_wanted_one_is_marked_asked_about_if_too_large_and_not_downloaded_if_incomplete(
    machine: None,
) -> None:
    shown = ShownDownloads()
    async with running(hub=ShownHub(MODELS), downloads=shown.opener) as app:
        screen = await opened(app, quantization="f16")
        assert screen.marked is not None and screen.marked.model.quantization == "F16"
        for pressed, begun in ((("enter",), 0), (("right", "enter"), 1)):
            await app.press("enter")
            question = await app.opens(ConfirmScreen)
            await app.until(lambda question=question: question.focused is not None)
            assert "weights 15.2" in app.screen_text
            await app.press(*pressed)
            await app.until(lambda begun=begun: app.app.screen is screen and len(shown.all()) == begun)
        await app.press("down", "enter")
        await app.told("missing in the repository")
        assert len(shown.all()) == 1


def test_which_one_is_marked_first() -> None:
    repository = Repository(id=REPO, revision=COMMIT, models=MODELS)
    q4, iq4, q8 = (MODELS[number].files[0].path for number in (1, 0, 3))
    state = RepositoryState(repository, MACHINE, {})
    assert [state.first_mark(wanted) for wanted in ("", "iq4_xs", "Q3_K_S")] == [q4, iq4, q4]
    assert RepositoryState(repository, MACHINE, {q8: Path("/x.gguf")}).first_mark() == q8
    assert RepositoryState(Repository(id=REPO, revision=COMMIT), MACHINE, {}).first_mark() == ""


def test_nothing_is_estimated_before_a_header_was_asked_for() -> None:
    state = RepositoryState(Repository(id=REPO, revision=COMMIT, models=MODELS), MACHINE, {})
    assert all(entry.prediction is None for entry in state.entries([], None))
    state.judged[MODELS[1].files[0].path] = AccessDenied("closed")
    judged = {entry.model.quantization: entry for entry in state.entries([], None)}
    assert judged["Q8_0"].prediction is not None and not judged["Q8_0"].prediction.exact
    assert judged["f16"].prediction is None
    assert isinstance(judged["Q4_K_M"].problem, AccessDenied)
