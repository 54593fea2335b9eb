"""Manages all downloads of one app: queued, running and paused ones, each in a separate process.

Unfinished ones are kept in a journal in the data folder, so that the next run resumes them however this one ended.
Several programs may write the journal: each changes only its own downloads.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from cpuchat.base import paths
from cpuchat.base.errors import DownloadFailed, HubError, UsageError
from cpuchat.base.files import JsonCache
from cpuchat.base.line_process import LineProcess
from cpuchat.base.processes import python_command
from cpuchat.models.downloads.hf_cache import bytes_here, discard
from cpuchat.models.downloads.state import RUNNING, Download, Order, RetryPolicy
from cpuchat.models.hub.repository import RepoModel, check_names
from cpuchat.models.library.places import hub_cache

# Read by huggingface_hub at import: no second way of transfer, no telemetry, no progress bars.
_ENVIRONMENT = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
_WINDOW = 8.0  # seconds of which the speed is the mean
_TICK = 1.0  # seconds without a report after which speed and time left are updated
_NO_ERROR = {"code": "", "message": "", "hint": ""}


class _Entry:
    """One download and its process. `wanted` is the state the user wants, `download.state` the actual one."""

    def __init__(self, download: Download) -> None:
        self.download = download
        self.wanted: Literal["run", "pause", "cancel", "close"] = "run"
        self.discard = False
        self.stopped = False
        self.readings: deque[tuple[float, int]] = deque()  # when how much was done, over the last seconds
        self.task: asyncio.Task[None] | None = None
        self.process: LineProcess[Download] | None = None
        self.settled = asyncio.Event()


class Downloads:
    """Manages downloads. Use it from one event loop; nothing here blocks on the network or the disk for long. Of all,
    `at_once` run at the same time; the others are `queued`. `changed` is called with each new state of a download, a
    few times a second while it runs; not for a cancelled one. `retry_policy`: how long network faults are retried."""

    def __init__(
        self,
        *,
        at_once: int = 2,
        changed: Callable[[Download], None] | None = None,
        retry_policy: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
    ) -> None:
        self._cache = hub_cache()
        self._at_once = at_once
        self._changed = changed or (lambda download: None)
        self._retry_policy = retry_policy
        self._journal = JsonCache(paths.downloads_file(), Download, version=2, max_entries=200, max_bytes=8 << 20)
        self._entries: dict[str, _Entry] = {}

    def all(self) -> list[Download]:
        """Return all downloads, oldest first."""
        return [entry.download for entry in self._entries.values() if entry.wanted != "cancel"]

    def start(self, repo: str, revision: str, model: RepoModel, newest_at: float = 0.0) -> Download:
        """Start or resume the download of `model` at the commit `revision`: the same model is the same download.
        `newest_at` see `Repository`. Raises UsageError, HubError: it cannot be downloaded; nothing is started."""
        check_names(repo, revision, model.files)
        if not model.complete or not model.files:
            raise HubError(f"{model.name} is incomplete on Hugging Face: parts are missing.", "Choose another file.")
        order = Order(repo=repo, revision=revision, model=model, newest_at=newest_at, cache=str(self._cache))
        entry = self._entries.get(order.id)
        if entry is None:
            known = self._journal.read().get(order.id)
            verified = known.verified if known is not None else ()
            download = Download(order=order, done=self._bytes_here(order), verified=verified)
            entry = self._entries[order.id] = _Entry(download)
        elif entry.download.state == "done" and Path(entry.download.path).exists():
            return entry.download
        elif entry.task is None:
            entry.download = replace(entry.download, order=order)
        self._run_again(entry)
        return entry.download

    def pause(self, id: str) -> None:
        """Stop a download and keep its partial files."""
        entry = self._find(id)
        if entry.download.state in RUNNING:
            entry.wanted = "pause"
            self._end(entry)

    def resume(self, id: str) -> None:
        """Continue a download that is paused or failed."""
        entry = self._find(id)
        if entry.download.state != "done":
            self._run_again(entry)

    def cancel(self, id: str, *, discard: bool = False) -> None:
        """Remove a download from the list. Its partial files stay unless `discard`; a finished model stays anyway."""
        entry = self._find(id)
        entry.wanted = "cancel"
        entry.discard = discard and entry.download.state != "done"
        self._journal.remove(id)
        if entry.task is None and entry.discard:
            entry.task = asyncio.create_task(self._run(entry))
        else:
            self._end(entry)

    def restore(self) -> None:
        """Restore the downloads of earlier runs: running ones continue, paused and failed ones stay so."""
        for id, last in self._journal.read().items():
            order = last.order
            try:  # anybody may have written it
                check_names(order.repo, order.revision, order.model.files)
            except (UsageError, HubError):
                continue
            if id in self._entries or order.id != id or last.state == "done":
                continue
            done = self._bytes_here(order)
            download = replace(last, done=done, checked=0, speed=0.0, seconds_left=None, retry_in=0.0)
            entry = self._entries[id] = _Entry(download)
            if last.state in RUNNING:
                self._queue(entry)
            else:
                entry.wanted = "pause"
                entry.settled.set()
                self._changed(entry.download)
        self._launch()

    async def wait(self, id: str) -> Download:
        """Wait until a download is done, failed, paused or cancelled and its process has ended; returns its last
        state."""
        entry = self._find(id)
        await entry.settled.wait()
        return entry.download

    async def close(self) -> None:
        """End all processes. Unfinished downloads stay in the journal for `restore` of the next run."""
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

    def _bytes_here(self, order: Order) -> int:
        return bytes_here(self._cache, order.repo, order.model.files)

    def _write_journal(self, entry: _Entry) -> None:
        """Record an unfinished download in the journal, or remove one that is done."""
        download = entry.download
        if download.state == "done":
            self._journal.remove(download.id)
        else:
            self._journal.update(lambda entries: entries.update({download.id: download}))

    def _run_again(self, entry: _Entry) -> None:
        """Queue it unless it runs; one that is being stopped starts again when it has ended."""
        entry.wanted = "run"
        if entry.task is None:
            self._queue(entry)
            self._launch()

    def _queue(self, entry: _Entry) -> None:
        entry.settled.clear()
        self._update(entry, replace(entry.download, state="queued", **_NO_ERROR))
        self._write_journal(entry)

    def _end(self, entry: _Entry) -> None:
        """End its process, if there is one; whatever has arrived is on the disk."""
        if entry.task is None:
            self._settle(entry)
        elif entry.process is not None:
            entry.stopped = True
            entry.task.cancel()

    def _launch(self) -> None:
        """Start as many of the queued downloads as may run."""
        running = sum(entry.task is not None for entry in self._entries.values())
        for entry in list(self._entries.values()):
            if running >= self._at_once:
                return
            if entry.task is None and entry.wanted == "run" and entry.download.state == "queued":
                entry.task = asyncio.create_task(self._run(entry), name=f"download {entry.download.order.repo}")
                running += 1

    async def _run(self, entry: _Entry) -> None:
        """Run the process of a download, then apply what is wanted when it has ended."""
        entry.stopped = False
        try:
            if entry.wanted == "run":
                await self._download(entry)
        except asyncio.CancelledError:
            if not entry.stopped:
                raise
        if entry.wanted == "cancel" and entry.discard:
            order = entry.download.order
            await asyncio.to_thread(discard, self._cache, order.repo, order.model.files)
        entry.task = None
        self._settle(entry)
        self._launch()

    async def _download(self, entry: _Entry) -> None:
        entry.readings.clear()  # else the pause would count
        others = (other.download for other in self._entries.values() if other is not entry and other.task is not None)
        reserved = sum(max(other.total - other.done, 0) for other in others)
        # What this manager decides, whatever the journal says.
        order = replace(
            entry.download.order, cache=str(self._cache), reserved=reserved, retry_policy=self._retry_policy
        )
        command = python_command("-m", "cpuchat.models.downloads.child")
        # It needs the token and the proxies.
        environment = {**os.environ, **_ENVIRONMENT}
        try:
            async with LineProcess[Download](
                command, "download process", Download, DownloadFailed, **environment
            ) as entry.process:
                await entry.process.send(replace(entry.download, order=order))
                while entry.wanted == "run" and entry.download.state in RUNNING:
                    await self._follow(entry, entry.process)
        except DownloadFailed as error:
            done, hint = self._bytes_here(order), "Resume to continue from the partial file."
            values = {"code": error.code, "message": error.message, "hint": hint}
            entry.download = replace(entry.download, state="failed", done=done, **values)
        finally:
            entry.process = None

    async def _follow(self, entry: _Entry, process: LineProcess[Download]) -> None:
        """Take over the next report of the process, or update the speed without one."""
        try:
            async with asyncio.timeout(_TICK):
                report = await process.receive()
        except TimeoutError:
            if entry.download.state == "running":
                self._update_speed(entry)
            return
        verified, entry.download = entry.download.verified, report
        if report.state in RUNNING:  # the last report is passed on when the process has ended
            self._update_speed(entry)
        if report.verified != verified and entry.wanted != "cancel":
            self._write_journal(entry)

    def _update_speed(self, entry: _Entry) -> None:
        download, readings, now = entry.download, entry.readings, time.monotonic()
        if download.state != "running" or (readings and download.done < readings[-1][1]):
            readings.clear()
        if download.state == "running":
            readings.append((now, download.done))
        while len(readings) > 2 and readings[1][0] <= now - _WINDOW:
            readings.popleft()
        speed = 0.0
        if len(readings) > 1 and now > readings[0][0]:
            speed = (download.done - readings[0][1]) / (now - readings[0][0])
        left = (download.total - download.done) / speed if speed else None
        self._update(entry, replace(download, speed=speed, seconds_left=left))

    def _settle(self, entry: _Entry) -> None:
        """Publish the last state after its process has ended, unless it is wanted again."""
        download = entry.download
        ended = download.state in ("done", "failed")
        if entry.wanted == "run" and not ended:
            self._queue(entry)
            return
        if not ended:
            download = replace(download, state="paused", done=self._bytes_here(download.order), **_NO_ERROR)
        entry.download = replace(download, speed=0.0, seconds_left=None, retry_in=0.0)
        if entry.wanted == "cancel":
            del self._entries[download.id]
        elif entry.wanted != "close":
            self._write_journal(entry)
        self._update(entry, entry.download)
        entry.settled.set()

    def _update(self, entry: _Entry, download: Download) -> None:
        entry.download = download
        if entry.wanted != "cancel":
            self._changed(download)
