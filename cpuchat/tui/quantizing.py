"""The quantizing job of the app: one at a time, and a signal that screens follow."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import App
from textual.signal import Signal
from textual.timer import Timer
from textual.worker import Worker, WorkerError

from cpuchat import paths
from cpuchat.errors import CpuchatError
from cpuchat.text import clean_line
from cpuchat.tui.downloading import PROGRESS_SECONDS

if TYPE_CHECKING:
    from cpuchat.models.quantize.make import Job, QuantizeProgress


class Quantizing:
    """Runs the quantizing job. Use it from the app's event loop only.

    `job` is being worked at, None: nothing is; `progress` of it, None before the first tensor. `outcome` says how the
    last one ended. `changed` is published when a job begins or ends, with the new file if it made one, and for mere
    progress at most every `PROGRESS_SECONDS`. Results are also shown as a toast.
    """

    def __init__(self, app: App[Any]) -> None:
        self.changed: Signal[Path | None] = Signal(app, "quantizing")
        self.job: Job | None = None
        self.progress: QuantizeProgress | None = None
        self.outcome = ""
        self._app = app
        self._worker: Worker[None] | None = None
        self._timer: Timer | None = None

    def start(self, job: Job) -> None:
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
        worker = self._worker
        self.stop()
        if worker is not None:
            with contextlib.suppress(WorkerError):
                await worker.wait()

    async def _make(self, job: Job) -> None:
        from cpuchat.models.quantize.make import quantize

        made: Path | None = None
        try:
            made = await quantize(job, self._told)
            self._app.notify(f"{clean_line(paths.shown(made))} written.", title="Quantized", markup=False)
        except CpuchatError as error:
            self.outcome = clean_line(error.message)
            self._app.notify(
                clean_line(str(error)), title="Not quantized", severity="error", timeout=15, markup=False
            )  # fmt: skip
        except asyncio.CancelledError:
            self.outcome = "Stopped; the partial file was deleted."
            raise
        finally:
            self.job = self.progress = self._worker = None
            self._publish(made)

    def _told(self, progress: QuantizeProgress) -> None:
        self.progress = progress
        if self._timer is None:
            self._timer = self._app.set_timer(PROGRESS_SECONDS, self._publish)

    def _publish(self, made: Path | None = None) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        self.changed.publish(made)
