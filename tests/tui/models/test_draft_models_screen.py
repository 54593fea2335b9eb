"""Tests choosing a draft model: real files, a real download from a local hub, and a picture."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cpuchat.base import paths
from cpuchat.config import settings
from cpuchat.models.drafts.choice import ChosenDrafts
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.present.models import MORE
from cpuchat.tui.models import drafts as draft_choice
from cpuchat.tui.models.drafts import DraftModelsScreen
from tests.support import models_screen
from tests.support.chat_app import RunningApp, running
from tests.support.downloads import ShownDownloads, model
from tests.support.head_files import tap_head_file
from tests.support.hub_server import HubServer
from tests.support.models_screen import list_of, mark
from tests.support.scripted_backend import WITH_DRAFT, ScriptedBackend
from tests.support.tiny_gguf import write_tiny_gguf

TARGET = paths.demo_dir() / DEMO_FILES["demo"]
DRAFT = paths.demo_dir() / DEMO_FILES["demo-draft"]
LOADED = msgspec.structs.replace(
    WITH_DRAFT, path=str(TARGET), name="cpuchat demo 8M", draft="", draft_quantization="", draft_work=None
)
HUB_REPO = "maker/Hub-Draft-GGUF"


def states(app: RunningApp) -> dict[str, str]:
    """Return the list's text about each candidate, by its key."""
    return {row.key: row.columns[2] for row in list_of(app).rows if row.columns is not None}


async def opened(app: RunningApp) -> DraftModelsScreen:
    """Open the screen and wait for all verdicts."""
    await models_screen.opened(app)
    await mark(app, f"local {TARGET}")
    await app.press("f9")
    screen = await app.opens(DraftModelsScreen)
    await app.until(lambda: screen.candidates is not None and "checking…" not in states(app).values())
    if any(row.key == MORE for row in list_of(app).rows):
        await mark(app, MORE)
        await app.press("enter")
    return screen


async def test_what_is_here_is_checked_and_enter_loads_the_pair_a_head_or_none(tmp_path: Path) -> None:
    settings.update({"speculation": {"drafters": "suffix"}})
    demo = read_model(TARGET)
    other = write_tiny_gguf(tmp_path / "other.gguf")
    head = tap_head_file(tmp_path / "eagle3-demo-Q8_0.gguf", n_embd=demo.n_embd, layers=(0, 1, 2), tokens=None)
    async with running(ScriptedBackend(model=LOADED), model=TARGET, folders=(tmp_path,)) as app:
        screen = await opened(app)
        assert states(app)[str(DRAFT)] == states(app)[str(head)] == "compatible"
        await app.until(lambda: str(other) in states(app))
        assert states(app)[str(other)] == "mismatch" == list(states(app).values())[-1]
        best = draft_choice.recommended((screen.candidates or {}).values())
        assert list_of(app).marked == (best.spec if best else next(iter(states(app))))
        await mark(app, str(other))
        await app.press("enter")
        await app.told("cannot be the draft model")
        assert app.app.screen is screen and len(app.backend.loads) == 1
        await mark(app, str(head))
        await app.until(lambda: "EAGLE-3 head" in app.screen_text)
        await mark(app, str(DRAFT))
        await app.until(lambda: "vocabulary  compatible" in app.screen_text)

        for number, (key, loaded) in enumerate(
            ((str(DRAFT), str(DRAFT)), ("none", ""), ("auto", str(DRAFT)), (str(head), str(head))), 2
        ):
            await mark(app, key)
            await app.press("enter")
            path, options = await app.loaded(number)
            assert path == TARGET and options.draft_path == loaded and app.app.screen is app.chat
            await app.until(lambda key=key: key in (ChosenDrafts().of(TARGET), "auto"))
            await opened(app)
        assert settings.load().speculation.drafters == "auto"


def _name_a_draft_on_the_hub() -> None:
    """Write a user's catalog with the demo model, and a draft model for it that is on the hub only."""
    models = (
        ("demo", "cpuchat demo 8M", read_model(TARGET).n_params / 1e9, "maker/demo-GGUF", 'drafts = ["hub-draft"]'),
        ("hub-draft", "Hub Draft", 0.5, HUB_REPO, "sizes = { Q8_0 = 0.001 }"),
    )
    paths.user_catalog().parent.mkdir(parents=True, exist_ok=True)
    with paths.user_catalog().open("w") as file:
        for id, name, params, repo, more in models:
            file.write(f'[[model]]\nid = "{id}"\nname = "{name}"\nfamily = "demo"\nparams = {params}\n')
            file.write(f'repos = ["{repo}"]\n{more}\n')


async def test_one_key_downloads_one_from_the_hub_and_activates_it(hub_server: HubServer) -> None:
    hub_server.add(HUB_REPO, {"hub-draft-Q8_0.gguf": DRAFT})
    _name_a_draft_on_the_hub()
    async with running(ScriptedBackend(model=LOADED), model=TARGET) as app:
        await opened(app)
        key = f"{HUB_REPO}:Q8_0"
        assert states(app)[key] == "compatible"  # by its header, read from the hub
        await mark(app, key)
        await app.press("enter")
        path, options = await app.loaded(2)
        assert path == TARGET and options.draft_path.endswith("hub-draft-Q8_0.gguf")
        assert Path(options.draft_path).read_bytes() == DRAFT.read_bytes()
        await app.until(lambda: ChosenDrafts().of(TARGET) == options.draft_path)


async def test_a_download_is_used_when_it_has_come_if_it_can_be(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(DRAFT.read_bytes()[:1000])
    shown = ShownDownloads()
    async with running(ScriptedBackend(model=LOADED), model=TARGET, downloads=shown.opener) as app:
        await app.ready()
        services, waiting = app.app.services, []
        for quantization in ("Q4_0", "Q6_K", "Q8_0"):
            begun = services.downloading.start(HUB_REPO, "0" * 40, model(quantization, 1_000_000))
            waiting.append(app.app.run_worker(draft_choice.use_when_here(app.app, services, begun, TARGET)))
        await app.pilot.pause()
        removed, broken, good = shown.all()
        services.downloading.cancel(removed.id)
        await app.until(lambda: waiting[0].is_finished)
        shown.put(msgspec.structs.replace(broken, state="done", path=str(cut)))
        await app.told("cannot be the draft model")
        for state in ("paused", "running", "failed", "running"):
            shown.put(msgspec.structs.replace(good, state=state))
            await app.pilot.pause()
        assert len(app.backend.loads) == 1 and ChosenDrafts().of(TARGET) == ""
        shown.put(msgspec.structs.replace(good, state="done", path=str(DRAFT)))
        assert (await app.loaded(2))[1].draft_path == str(DRAFT)


async def test_without_a_connection_those_on_the_hub_are_listed_unchecked() -> None:
    _name_a_draft_on_the_hub()
    async with running(ScriptedBackend(model=LOADED), model=TARGET) as app:
        await opened(app)
        key = f"{HUB_REPO}:Q8_0"
        assert states(app)[key] == "unknown" and states(app)[str(DRAFT)] == "compatible"
        await mark(app, key)
        await app.shows("unknown:")
        await app.press("enter")
        await app.told("ffline")
        assert len(app.backend.loads) == 1
