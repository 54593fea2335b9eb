"""The app's downloads and its quantizing job: created on first use, each with a signal that screens follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import App
from textual.signal import Signal
from textual.worker import Worker

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, HubOffline
from cpuchat.base.text import clean_line
from cpuchat.models.downloads.state import RUNNING, Download, State
from cpuchat.models.hub.repository import RepoModel
from cpuchat.present import downloads
from cpuchat.tui.threads import LoopTimer, result_of

if TYPE_CHECKING:
    from cpuchat.models.downloads.manager import Downloads
    from cpuchat.models.quantize.make import QuantizeJob, QuantizeProgress


# Drawn this seldom, progress costs a chat nothing that could be felt.
PROGRESS_SECONDS = 0.5
TOLD_SECONDS = 6.0

Opener = Callable[[Callable[[Download], None]], "Downloads"]


def open_downloads(changed: Callable[[Download], None]) -> Downloads:
    """Create the manager; it calls `changed` for every step."""
    from cpuchat.models.downloads.manager import Downloads

    return Downloads(changed=changed)


class Downloading:
    """Manages the app's models. Use it from the app's event loop only.

    `changed` is published at once when a download changes its state or leaves the list, for mere progress at most every
    `PROGRESS_SECONDS`. Ends, good and bad, are also told as a passing message, whatever screen is shown."""

    def __init__(self, app: App[Any], opener: Opener = open_downloads) -> None:
        self.changed: Signal[Download] = Signal(app, "downloads")
        self.hub_problem = ""
        """Why the hub was not reached when it was asked last; "" once it was."""
        self._app = app
        self._opener = opener
        self._manager: Downloads | None = None
        self._states: dict[str, State] = {}
        self._newest = ""  # id of the one that began or ended last in this run
        self._waiting: dict[str, Download] = {}  # progress that is not published yet
        self._timer = LoopTimer(self._publish_progress)
        self._stepped = asyncio.Event()  # a download has another state now, or has left the list

    def all(self) -> list[Download]:
        """Return all models, oldest first."""
        return [] if self._manager is None else self._manager.all()

    def newest(self) -> Download | None:
        """Return the one that began or ended last, else the last that has not ended; None without any."""
        found = self.all()
        left = [download for download in found if download.state != "done"]
        return self._find(self._newest) or next(reversed(left or found), None)

    # One that has left the list meanwhile is no error.

    def start(self, repo: str, revision: str, model: RepoModel, newest_at: float = 0.0) -> Download:
        """Download `model` of the commit `revision`; one that is in the list already goes on. `newest_at` see
        `Repository`. Raises UsageError, HubError: it can't be downloaded, whatever is tried."""
        download = self._open().start(repo, revision, model, newest_at)
        self._states.setdefault(download.id, download.state)
        self._newest = download.id
        return download

    def resume(self, id: str) -> None:
        """Resume a paused one, retry a failed one."""
        if self._manager is not None and self._find(id) is not None:
            self._manager.resume(id)

    def hold(self, id: str) -> None:
        """Toggle between paused (the partial files stay) and running."""
        now = self._find(id)
        if self._manager is not None and now is not None and now.state in RUNNING:
            self._manager.pause(id)
        elif now is not None and now.state != "done":
            self.resume(id)

    def cancel(self, id: str, *, discard: bool = False) -> None:
        """Remove it from the list; with `discard` the partial files are deleted."""
        gone = self._find(id)
        if self._manager is not None and gone is not None:
            self._manager.cancel(id, discard=discard)
            self._stepped.set()
            self.changed.publish(gone)

    async def arrival(self, id: str) -> Download | None:
        """Wait until it is done, through pauses and retries; None once it is off the list."""
        while (download := self._find(id)) is not None and download.state != "done":
            self._stepped.clear()
            await self._stepped.wait()
        return download

    def _find(self, id: str) -> Download | None:
        return next((download for download in self.all() if download.id == id), None)

    def restore(self) -> None:
        """Resume what the last run left unfinished."""
        if paths.downloads_file().exists():
            self._open().restore()

    async def close(self) -> None:
        """Stop the transfers; the next run resumes them."""
        self._timer.stop()
        manager, self._manager = self._manager, None
        if manager is not None:
            await manager.close()

    def _open(self) -> Downloads:
        if self._manager is None:
            self._manager = self._opener(self._told)
        return self._manager

    def _told(self, download: Download) -> None:
        if self._manager is None:  # closing
            return
        before = self._states.get(download.id)
        if download.code == HubOffline.code and before is not None:
            self.hub_problem = download.message
        elif download.speed or download.state in ("checking", "done"):
            self.hub_problem = ""
        self._states[download.id] = download.state
        if download.state == before:
            self._waiting[download.id] = download
            self._timer.start(PROGRESS_SECONDS)
            return
        self._waiting.pop(download.id, None)
        self._stepped.set()
        self.changed.publish(download)
        if before is None or download.state not in ("done", "failed"):  # None: restored, and ended in another run
            return
        self._newest = download.id
        title = downloads.download_title(download.order.model)
        has_key = any(hasattr(screen, "action_downloads") for screen in self._app.screen_stack[-1:])
        if download.state == "done":
            text = f"{title}. Ctrl+G, Enter loads it." if has_key else title
            self._app.notify(text, title="Downloaded", timeout=TOLD_SECONDS, markup=False)
        else:
            text = f"{title}: {clean_line(download.message)}{' Ctrl+G shows details.' if has_key else ''}"
            self._app.notify(text, title="Download failed", severity="error", timeout=TOLD_SECONDS, markup=False)

    def _publish_progress(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for download in waiting.values():
            self.changed.publish(download)


class Quantizing:
    """Runs the quantizing job. Use it from the app's event loop only.

    `job` is being worked at, None: nothing is; `progress` of it, None before the first tensor. `outcome` says how the
    last one ended. `changed` is published when a job begins or ends, with the new file if it made one, and for mere
    progress at most every `PROGRESS_SECONDS`. Results are also shown as a toast."""

    def __init__(self, app: App[Any]) -> None:
        self.changed: Signal[Path | None] = Signal(app, "quantizing")
        self.job: QuantizeJob | None = None
        self.progress: QuantizeProgress | None = None
        self.outcome = ""
        self._app = app
        self._worker: Worker[None] | None = None
        self._timer = LoopTimer(self._publish)

    def start(self, job: QuantizeJob) -> None:
        """Start `job`; no other may be running."""
        assert self.job is None
        self.job, self.outcome = job, ""
        self._worker = self._app.run_worker(self._make(job), group="quantize", name="quantize")
        self.changed.publish(None)

    def stop(self) -> None:
        """Stop and delete the partial file."""
        if self._worker is not None:
            self._worker.cancel()

    async def close(self) -> None:
        """Stop, and wait for it."""
        if (worker := self._worker) is not None:
            worker.cancel()
            await result_of(worker)

    async def _make(self, job: QuantizeJob) -> None:
        from cpuchat.models.quantize.make import quantize

        made: Path | None = None
        try:
            made = await quantize(job, self._told)
            self._app.notify(f"{clean_line(paths.shown(made))} written.", title="Quantized", markup=False)
        except CpuchatError as error:
            self.outcome = clean_line(error.message)
            text = clean_line(str(error))
            self._app.notify(text, title="Not quantized", severity="error", timeout=15, markup=False)
        except asyncio.CancelledError:
            self.outcome = "Stopped; the partial file was deleted."
            raise
        finally:
            self.job = self.progress = self._worker = None
            self._publish(made)

    def _told(self, progress: QuantizeProgress) -> None:
        self.progress = progress
        self._timer.start(PROGRESS_SECONDS)

    def _publish(self, made: Path | None = None) -> None:
        self._timer.stop()
        self.changed.publish(made)
