"""Runs one load, one answer or one measurement at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from textual.screen import Screen
from textual.worker import Worker, WorkerError

from cpuchat.config.servers import Source
from cpuchat.protocol.messages import AnyEvent, Failed, ModelLoaded
from cpuchat.tui.chat.answering import Answering
from cpuchat.tui.chat.build_probe import BuildProbe
from cpuchat.tui.chat.pass_probe import PassProbe, show_ceiling
from cpuchat.tui.chat.titling import ChatTitler
from cpuchat.tui.services import Services
from cpuchat.tui.threads import yield_to_inference


class ChatStream:
    """Runs each in a worker of `screen`. Use it from the event loop.

    `path` is the model that was chosen; `loaded` that it was loaded once (the backend starts it again by itself).
    `on_start` is called when something begins to run, `on_idle` when it has ended and the app still runs,
    `on_model` when a model was loaded, `on_title` when the open chat has a new title.
    """

    def __init__(
        self,
        screen: Screen[Any],
        services: Services,
        answering: Answering,
        path: Source | None,
        *,
        on_start: Callable[[], None],
        on_idle: Callable[[], None],
        on_model: Callable[[], None],
        on_title: Callable[[], None],
    ) -> None:
        self._screen = screen
        self._services = services
        self._answering = answering
        self._on_start, self._on_idle, self._on_model = on_start, on_idle, on_model
        self.probe = BuildProbe(screen, services, lambda: self.loaded and self._is_idle())
        self.passes = PassProbe(screen, services, self._is_idle)
        self.titles = ChatTitler(screen, services, lambda: self.loaded and self._is_idle(), on_title)
        self.path = path
        self.loaded = False
        self._worker: Worker[None] | None = None
        self._leave: Callable[[], None] | None = None  # stops detached work when the app quits

    @property
    def busy(self) -> bool:
        return self._worker is not None

    def _is_idle(self) -> bool:
        services = self._services
        probing = self.probe.running or self.passes.running or self.titles.running
        busy = self.busy or probing or services.quantizing.job is not None
        return not busy and not self._answering.reading and not services.leaving

    @property
    def detached(self) -> bool:
        """Return whether a measurement runs, which its own screen can stop."""
        return self._leave is not None

    @property
    def writing(self) -> bool:
        """Return whether an answer is running or about to."""
        return self.busy and not self._answering.loading and not self.detached

    def run(self, work: Awaitable[None]) -> None:
        """Run `work`; nothing else may be running."""

        app = self._screen.app  # not running after an error or a signal, and while it ends: its widgets are gone

        async def run() -> None:
            if app.is_running:
                self._on_start()
            try:
                await self.stop_probes()
                await work
            finally:
                self._worker = None
                if app.is_running:
                    self._on_idle()

        self._worker = self._screen.run_worker(run(), group="stream", name="stream")

    def load(self, path: Source) -> None:
        """Load `path`; if that fails, load the previous model again."""
        before = self._services.loaded
        self.path, self.loaded = path, False
        self._answering.loading = path.stem
        self.run(self._load(path, before))

    async def _load(self, path: Source, before: Source | None) -> None:
        last = await self._load_one(path)
        if isinstance(last, Failed) and before not in (None, path) and not self._services.leaving:
            self._screen.notify(f"Loading {before.stem} again.", markup=False)
            await self._load_one(before)

    async def _load_one(self, path: Source) -> AnyEvent | None:
        self.path, self.loaded = path, False
        last = await self._answering.load(path)
        self.loaded = isinstance(last, ModelLoaded)
        if self.loaded:
            yield_to_inference()
            self._on_model()
            # It may fit the cost model anew, so nothing waits for it.
            self._screen.run_worker(show_ceiling(self._services.conversation), group="ceiling", exclusive=True)
            self._services.save_settings({"model": {"last": str(path)}})
        return last

    def run_detached(self, work: Awaitable[None], leave: Callable[[], None]) -> None:
        """Run a measurement, which may load the model again. `leave` stops it when the app quits."""
        self._leave = leave
        self._answering.silence()
        self.run(self._run_detached(work))

    async def _run_detached(self, work: Awaitable[None]) -> None:
        try:
            await work
            await show_ceiling(self._services.conversation)
        finally:
            self._leave = None
            if self.path is not None:
                self.loaded = self._services.conversation.model is not None
            self._answering.model_changed()
            if self.loaded:
                self._on_model()

    async def stop_probes(self) -> None:
        """Stop what is measured while the app is idle; it starts again when it is."""
        await self.titles.stop()
        await self.probe.stop()
        await self.passes.stop()

    async def finish(self) -> None:
        """Stop what runs and wait until its last text is shown and stored."""
        await self.stop_probes()
        if self._leave is not None:
            self._leave()
        if (worker := await self.stop()) is not None:
            with contextlib.suppress(WorkerError):
                await worker.wait()

    async def stop(self) -> Worker[None] | None:
        """Stop what runs; returns the worker that it ran in."""
        worker, conversation = self._worker, self._services.conversation
        while worker and worker is self._worker and not conversation.busy and not worker.is_finished:
            await asyncio.sleep(0.01)  # it is just about to begin, or to end
        await conversation.stop()
        return worker
