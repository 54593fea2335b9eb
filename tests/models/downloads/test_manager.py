"""Tests the list of downloads of a program: order, pausing, what survives its end."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from cpuchat.base import paths
from cpuchat.base.errors import UsageError
from cpuchat.models.downloads.manager import Downloads
from cpuchat.models.downloads.state import Download
from cpuchat.models.hub.repository import RepoModel
from tests.models.downloads.conftest import CONTENT, NAME, QUICK, REPO, Site
from tests.support.hub_server import Fault, Gate

pytestmark = pytest.mark.slow

SIZE = len(CONTENT)


class Watched:
    """A manager, and all that it told."""

    def __init__(self, site: Site, *, at_once: int = 2) -> None:
        self.site = site
        self.told: list[Download] = []
        self.downloads = Downloads(at_once=at_once, changed=self.told.append, retry_policy=QUICK)

    def start(self, model: RepoModel | None = None) -> str:
        return self.downloads.start(REPO, self.site.commit, model or self.site.model).id

    async def held(self, at: int) -> str:
        """Start a download that has received everything before byte `at`, and waits for more."""
        gate = Gate(at=at)
        self.site.hub.fault(REPO, NAME, Fault(gate=gate))
        id = self.start()
        await asyncio.to_thread(self.site.wait_for_part, gate)
        return id

    def states(self, id: str) -> list[str]:
        """Return the reported states in order, without repetitions."""
        states = [one.state for one in self.told if one.id == id]
        return [state for n, state in enumerate(states) if n == 0 or states[n - 1] != state]


@pytest.fixture
async def watched(site: Site) -> AsyncIterator[Watched]:
    """Yield a manager of the site; it is closed at the end of the test."""
    watched = Watched(site)
    yield watched
    await watched.downloads.close()


def small_models(site: Site, count: int) -> list[RepoModel]:
    """Add several models to the repository."""
    site.put({f"m{n}.gguf": random.Random(n).randbytes(100_000) for n in range(count)})
    return [RepoModel(name=f"m{n}", files=(file,)) for n, file in enumerate(site.files)]


def journal() -> dict[str, str]:
    """Return the states of the downloads in the journal."""
    kept = json.loads(paths.downloads_file().read_text())["entries"]
    return {id: download["state"] for id, download in kept.items()}


async def test_a_download_from_start_to_done_after_a_damaged_journal_which_is_an_empty_one(watched: Watched) -> None:
    paths.downloads_file().parent.mkdir(parents=True)
    paths.downloads_file().write_text('{"version": 1, "entries": {"x": ')
    watched.downloads.restore()
    assert watched.downloads.all() == []
    id = watched.start()
    done = await watched.downloads.wait(id)
    assert (done.state, done.done, done.share) == ("done", SIZE, 1.0)
    assert Path(done.path).read_bytes() == CONTENT
    assert watched.states(id) == ["queued", "running", "checking", "done"]
    assert [one.state for one in watched.told].count("done") == 1
    assert journal() == {}


async def test_not_more_run_than_may(site: Site) -> None:
    models = small_models(site, 2)
    watched = Watched(site, at_once=1)
    ids = [watched.start(model) for model in models]
    assert [one.state for one in watched.downloads.all()] == ["queued"] * 2
    assert [one.id for one in watched.downloads.all()] == ids
    assert [(await watched.downloads.wait(id)).state for id in ids] == ["done"] * 2
    ran = [one.id for one in watched.told if one.state not in ("queued", "done")]
    assert list(dict.fromkeys(ran)) == ids
    assert ran == sorted(ran, key=ids.index)  # one after the other
    await watched.downloads.close()


async def test_paused_and_resumed_it_goes_on_from_what_is_there_and_counts_no_pause_as_speed(watched: Watched) -> None:
    id = await watched.held(600_000)
    watched.downloads.pause(id)
    paused = await watched.downloads.wait(id)
    assert (paused.state, paused.done, paused.speed, paused.seconds_left) == ("paused", 600_000, 0.0, None)
    assert journal() == {id: "paused"}
    with watched.site.part().open("ab") as part:  # another program went on with it
        part.write(CONTENT[600_000:700_000])
    watched.told.clear()
    watched.downloads.resume(id)
    assert (await watched.downloads.wait(id)).state == "done"
    first = next(one for one in watched.told if one.state == "running")
    assert (first.done, first.speed, first.seconds_left) == (700_000, 0.0, None)
    assert watched.site.asked() == ["bytes=0-", "bytes=700000-"]


@pytest.mark.parametrize("discard", [False, True])
async def test_cancelled_it_leaves_the_list_and_the_part_only_if_wanted(watched: Watched, discard: bool) -> None:
    id = await watched.held(600_000)
    waiting = asyncio.create_task(watched.downloads.wait(id))
    await asyncio.sleep(0)
    watched.downloads.cancel(id, discard=discard)
    assert watched.downloads.all() == []
    assert (await waiting).state == "paused"
    assert watched.site.part().exists() is not discard
    assert journal() == {}
    with pytest.raises(UsageError):
        watched.downloads.pause(id)


async def test_discarded_while_paused_nothing_of_it_stays_but_what_others_use(watched: Watched, site: Site) -> None:
    names = [f"big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    site.put({name: random.Random(n).randbytes(50_000) for n, name in enumerate(names)})
    shared, alone, missing = site.files
    site.fetch(replace(site.order(), model=replace(site.model, files=(shared,))))
    link = site.blobs.parent / "snapshots" / site.commit / names[0]
    (link.parent / "another-name.gguf").symlink_to(link.readlink())
    site.hub.fault(REPO, names[2], Fault(where="hub", status=404, error_code="EntryNotFound"))
    id = watched.start()
    failed = await watched.downloads.wait(id)
    assert (failed.state, failed.code, failed.done) == ("failed", "not_on_hub", 100_000)
    watched.downloads.cancel(id, discard=True)
    await watched.downloads.close()
    assert {path.name for path in site.blobs.iterdir()} == {shared.etag}
    assert not (link.parent / names[1]).is_symlink()
    assert (link.parent / "another-name.gguf").exists()
    assert alone.etag != missing.etag


async def test_a_failure_is_told_with_its_hint_and_can_be_tried_again(watched: Watched, site: Site) -> None:
    site.hub.fault(REPO, NAME, Fault(status=503, times=4))
    id = watched.start()
    failed = await watched.downloads.wait(id)
    assert (failed.state, failed.code) == ("failed", "download_failed")
    assert failed.message and failed.hint
    assert journal() == {id: "failed"}
    watched.downloads.resume(id)
    done = await watched.downloads.wait(id)
    assert (done.state, done.code, done.message) == ("done", "", "")


async def test_without_room_for_a_temporary_file_it_fails(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr("tempfile.TemporaryFile", lambda: os.open("/nowhere/at/all", 0))
        failed = await watched.downloads.wait(watched.start())
    assert (failed.state, failed.code) == ("failed", "download_failed")
    assert failed.message == "Cannot start the download process: No such file or directory."


async def test_a_process_that_is_killed_is_a_failure_that_can_be_resumed(watched: Watched) -> None:
    id = await watched.held(600_000)
    [child] = [one for one in psutil.Process().children() if "cpuchat.models.downloads.child" in one.cmdline()]
    child.kill()
    failed = await watched.downloads.wait(id)
    assert (failed.state, failed.done) == ("failed", 600_000)
    assert "killed by SIGKILL" in failed.message and "partial file" in failed.hint
    watched.downloads.resume(id)
    assert (await watched.downloads.wait(id)).state == "done"


async def test_the_next_run_goes_on_with_what_ran_and_leaves_what_was_paused(watched: Watched, site: Site) -> None:
    id = await watched.held(600_000)
    [other] = small_models(site, 1)
    paused = watched.start(other)
    watched.downloads.pause(paused)
    await watched.downloads.wait(paused)
    await watched.downloads.close()

    again = Watched(site)
    again.downloads.restore()
    assert {one.id: one.state for one in again.downloads.all()} == {id: "queued", paused: "paused"}
    assert again.downloads.all()[0].done == 600_000
    assert (await again.downloads.wait(id)).state == "done"
    assert journal() == {paused: "paused"}
    await again.downloads.close()


async def test_a_journal_that_leads_out_of_the_cache_is_not_followed(watched: Watched, site: Site) -> None:
    id = await watched.held(1000)
    await watched.downloads.close()
    file = paths.downloads_file()
    file.write_text(file.read_text().replace(NAME, "../../../../outside.gguf"))
    again = Watched(site)
    again.downloads.restore()
    assert again.downloads.all() == []
    assert id in journal()
