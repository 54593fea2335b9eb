"""All downloads of one program: what waits, what runs, what is paused; each in a process of its own."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from cpuchat.errors import DownloadFailed, HubError, UsageError
from cpuchat.models.downloads.journal import Journal, Unfinished, was_running
from cpuchat.models.downloads.layout import bytes_here
from cpuchat.models.downloads.placing import discard
from cpuchat.models.downloads.process import DownloadProcess, log_file
from cpuchat.models.downloads.rate import Rate
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.models.downloads.wire import Order, Patience, Report
from cpuchat.models.hub.names import check_names
from cpuchat.models.hub.repository import RepoModel
from cpuchat.models.library.places import hub_cache
from cpuchat.paths import shown

_TICK = 1.0
"""Seconds without a report after which speed and time left are told anew."""
_NO_ERROR = {"code": "", "message": "", "hint": ""}


class _Entry:
    """One download and what runs for it. `wanted` is what the user wants, `download.state` what is."""

    def __init__(self, download: Download, verified: tuple[str, ...] = ()) -> None:
        self.download = download
        self.verified = verified
        self.wanted: Literal["run", "pause", "cancel", "close"] = "run"
        self.discard = False
        self.stopping = False
        self.rate = Rate()
        self.task: asyncio.Task[None] | None = None
        self.process: DownloadProcess | None = None
        self.settled = asyncio.Event()

    def stop(self) -> None:
        """Have its process end, if there is one."""
        if self.process is not None:
            self.stopping = True
            self.process.terminate()


class Downloads:
    """Use from one event loop; nothing here waits for the network or the disk for long.

    Args:
        cache: the Hugging Face cache to put models into; else the user's.
        at_once: how many run at the same time; the others are `queued`.
        changed: called with each new state of a download, a few times a second while it runs; not for one that was
            cancelled.
        patience: how long faults are borne.
    """

    def __init__(
        self,
        *,
        cache: Path | None = None,
        at_once: int = 2,
        changed: Callable[[Download], None] | None = None,
        patience: Patience = Patience(),  # noqa: B008 - frozen
    ) -> None:
        self._cache = cache or hub_cache()
        self._at_once = at_once
        self._changed = changed or (lambda download: None)
        self._patience = patience
        self._journal = Journal()
        self._entries: dict[str, _Entry] = {}

    def all(self) -> list[Download]:
        """Oldest first."""
        return [entry.download for entry in self._entries.values() if entry.wanted != "cancel"]

    def start(self, repo: str, revision: str, model: RepoModel, newest_at: float = 0.0) -> Download:
        """Begin to download `model` of the commit `revision`, or go on with it: the same model is the same download.

        `newest_at` see `Repository`.

        Raises:
            UsageError, HubError: it is none that can be downloaded; nothing is begun.
        """
        check_names(repo, revision, model.files)
        if not model.complete or not model.files:
            raise HubError(f"{model.name} is not complete on the hub: parts are missing.", "Choose another one.")
        id = _id(repo, model)
        entry = self._entries.get(id)
        if entry is None:
            known = self._journal.find(id)
            download = Download(
                id=id, repo=repo, revision=revision, model=model, newest_at=newest_at, done=self._here(repo, model)
            )
            entry = self._entries[id] = _Entry(download, known.verified if known is not None else ())
        elif entry.download.state == "done" and Path(entry.download.path).exists():
            return entry.download
        elif entry.task is None:
            entry.download = replace(entry.download, revision=revision, model=model, newest_at=newest_at)
        self._run_again(entry)
        return entry.download

    def pause(self, id: str) -> None:
        """Stop it; what arrived is kept."""
        entry = self._find(id)
        if entry.download.state in RUNNING:
            entry.wanted = "pause"
            self._end(entry)

    def resume(self, id: str) -> None:
        """Go on with one that is paused or failed."""
        entry = self._find(id)
        if entry.download.state != "done":
            self._run_again(entry)

    def cancel(self, id: str, *, discard: bool = False) -> None:
        """Take it from the list. What arrived stays for another time, unless it is to be discarded.

        A model that is done stays in any case.
        """
        entry = self._find(id)
        entry.wanted = "cancel"
        entry.discard = discard and entry.download.state != "done"
        self._journal.forget(id)
        if entry.task is None and entry.discard:
            entry.task = asyncio.create_task(self._run(entry))
        else:
            self._end(entry)

    def restore(self) -> None:
        """Bring back what earlier runs left: what was running goes on, what was paused or failed stays so."""
        for kept in self._journal.read():
            if kept.download.id not in self._entries and _is_sound(kept):
                self._restore(kept)
        self._launch()

    async def wait(self, id: str) -> Download:
        """Its last state, once it is done, failed, paused or cancelled and nothing runs for it any more."""
        entry = self._find(id)
        await entry.settled.wait()
        return entry.download

    async def close(self) -> None:
        """End all processes. What is not done stays in the journal as it is: `restore` of the next run goes on."""
        tasks = [entry.task for entry in self._entries.values() if entry.task is not None]
        for entry in list(self._entries.values()):
            if entry.download.state in RUNNING and entry.wanted != "cancel":
                entry.wanted = "close"
                self._end(entry)
        await asyncio.gather(*tasks)

    def _find(self, id: str) -> _Entry:
        try:
            return self._entries[id]
        except KeyError:
            raise UsageError(f"There is no download {id}.", "It may have been cancelled.") from None

    def _here(self, repo: str, model: RepoModel) -> int:
        return bytes_here(self._cache, repo, model.files)

    def _restore(self, kept: Unfinished) -> None:
        there = kept.download
        done = self._here(there.repo, there.model)
        entry = _Entry(replace(there, done=done, checked=0, speed=0.0, seconds_left=None, retry_in=0.0), kept.verified)
        self._entries[there.id] = entry
        if was_running(kept):
            self._queue(entry)
        else:
            entry.wanted = "pause"
            entry.settled.set()
            self._changed(entry.download)

    def _run_again(self, entry: _Entry) -> None:
        """Unless it runs; one that is ending begins anew when it has ended."""
        entry.wanted = "run"
        if entry.task is None:
            self._queue(entry)
            self._launch()

    def _queue(self, entry: _Entry) -> None:
        entry.settled.clear()
        self._update(entry, replace(entry.download, state="queued", **_NO_ERROR))
        self._journal.write(entry.download, entry.verified)

    def _end(self, entry: _Entry) -> None:
        entry.stop()
        if entry.task is None:
            self._settle(entry)

    def _launch(self) -> None:
        """Start as many of those that are queued as may run."""
        running = sum(entry.task is not None for entry in self._entries.values())
        for entry in list(self._entries.values()):
            if running >= self._at_once:
                return
            if entry.task is None and entry.wanted == "run" and entry.download.state == "queued":
                entry.task = asyncio.create_task(self._run(entry), name=f"download {entry.download.repo}")
                running += 1

    async def _run(self, entry: _Entry) -> None:
        """From the start of its process to whatever is wanted when it has ended."""
        if entry.wanted == "run":
            await self._download(entry)
        if entry.wanted == "cancel" and entry.discard:
            download = entry.download
            await asyncio.to_thread(discard, self._cache, download.repo, download.model.files)
        entry.task = None
        self._settle(entry)
        self._launch()

    async def _download(self, entry: _Entry) -> None:
        entry.stopping = False
        entry.rate.clear()  # else the time before this would count
        try:
            entry.process = await DownloadProcess.start(self._order(entry))
        except OSError as error:
            self._fail(entry, f"The download's process cannot be started: {error.strerror}.")
            return
        if entry.wanted != "run":
            entry.stop()
        async for report in entry.process.reports(_TICK):
            if report is not None:
                self._take(entry, report)
            elif entry.download.state == "running":
                self._measure(entry)
        entry.process = None
        if not entry.stopping and entry.download.state == "paused":
            entry.wanted = "pause"  # somebody else told it to stop
        elif not entry.stopping and entry.download.state in RUNNING:
            self._fail(entry, "The download's process ended unexpectedly.")

    def _order(self, entry: _Entry) -> Order:
        download = entry.download
        others = (other.download for other in self._entries.values() if other is not entry and other.task is not None)
        return Order(
            repo=download.repo,
            revision=download.revision,
            files=download.model.files,
            cache=str(self._cache),
            newest_at=download.newest_at,
            verified=entry.verified,
            reserved=sum(max(other.total - other.done, 0) for other in others),
            patience=self._patience,
        )

    def _take(self, entry: _Entry, report: Report) -> None:
        news = {name: getattr(report, name) for name in Report.__struct_fields__ if name != "verified"}
        verified, entry.verified = entry.verified, report.verified
        entry.download = replace(entry.download, **news)
        if report.state in RUNNING:  # the last one is told when the process has ended
            self._measure(entry)
        if report.verified != verified and entry.wanted != "cancel":
            self._journal.write(entry.download, entry.verified)

    def _measure(self, entry: _Entry) -> None:
        """Tell how fast it is now."""
        download = entry.download
        if download.state == "running":
            entry.rate.add(time.monotonic(), download.done)
        else:
            entry.rate.clear()
        speed = entry.rate.per_second
        left = (download.total - download.done) / speed if speed else None
        self._update(entry, replace(download, speed=speed, seconds_left=left))

    def _fail(self, entry: _Entry, message: str) -> None:
        hint = f"Resume it: what arrived is kept. Log: {shown(log_file())}"
        values = {"code": DownloadFailed.code, "message": message, "hint": hint}
        done = self._here(entry.download.repo, entry.download.model)
        entry.download = replace(entry.download, state="failed", done=done, **values)

    def _settle(self, entry: _Entry) -> None:
        """Nothing runs for it now. Unless it is wanted again, tell where it stands."""
        download = entry.download
        ended = download.state in ("done", "failed")
        if entry.wanted == "run" and not ended:
            self._queue(entry)
            return
        if not ended:
            done = self._here(download.repo, download.model)
            download = replace(download, state="paused", done=done, **_NO_ERROR)
        if entry.wanted == "cancel":
            del self._entries[download.id]
        elif entry.wanted != "close":
            self._journal.write(download, entry.verified)
        self._update(entry, replace(download, speed=0.0, seconds_left=None, retry_in=0.0))
        entry.settled.set()

    def _update(self, entry: _Entry, download: Download) -> None:
        entry.download = download
        if entry.wanted != "cancel":
            self._changed(download)


def _id(repo: str, model: RepoModel) -> str:
    """The same for the same content of the same repository, in whatever revision."""
    named = "\n".join([repo, model.name, *(file.etag for file in model.files)])
    return hashlib.sha256(named.encode()).hexdigest()[:12]


def _is_sound(kept: Unfinished) -> bool:
    """The journal may have been written by anybody."""
    there = kept.download
    try:
        check_names(there.repo, there.revision, there.model.files)
    except (UsageError, HubError):
        return False
    return there.id == _id(there.repo, there.model) and there.state != "done"
