"""Measures the loaded model once per build of the engine, while the app is idle, and reports when it got slower."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from textual.screen import Screen
from textual.worker import Worker, WorkerError

from cpuchat.errors import CpuchatError, MeasureFailed
from cpuchat.protocol import AnyEvent, Generate
from cpuchat.text import clean_line
from cpuchat.tui.services import Services

CHECK_SECONDS = 5.0
IDLE_CHECKS = 4
"""Consecutive checks that must find the app idle."""


class BuildProbe:
    """Gives way to everything: `stop` it before the conversation is used.

    Args:
        is_idle: a model is loaded and nothing runs.
    """

    def __init__(self, screen: Screen[Any], services: Services, is_idle: Callable[[], bool]) -> None:
        self._screen, self._services, self._is_idle = screen, services, is_idle
        self._idle = 0
        self._stopped = False
        self.done = ""
        """Return the path of the model that was measured, or cannot be."""
        self._worker: Worker[None] | None = None
        screen.set_interval(CHECK_SECONDS, self._check)

    def _check(self) -> None:
        model = self._services.conversation.model
        idle = (
            model is not None
            and not model.server
            and model.path != self.done
            and self._is_idle()
            and self._screen.is_current
        )
        self._idle = self._idle + 1 if idle and self._worker is None else 0
        if self._idle >= IDLE_CHECKS:
            self._idle, self._stopped = 0, False
            self._worker = self._screen.run_worker(self._run(), group="build-probe", name="build-probe")

    async def stop(self) -> None:
        """Stop the measurement; it starts again when the app is idle."""
        self._idle, worker = 0, self._worker
        if worker is not None:
            self._stopped = True
            await self._services.conversation.stop()
            with contextlib.suppress(WorkerError):
                await worker.wait()

    async def _run(self) -> None:
        from cpuchat.tune.build_speed import BuildSpeeds, is_measured, measure_build, speed_key

        conversation = self._services.conversation
        model, engine = conversation.model, conversation.backend.engine
        try:
            if model is None or engine is None or self._stopped:
                return
            key, speeds = speed_key(model, conversation.in_effect.engine), BuildSpeeds()
            known = await asyncio.to_thread(speeds.newest, key)
            if not is_measured(known, engine):
                speed, notice = await measure_build(self._answer, engine, model, known)
                await asyncio.to_thread(speeds.put, key, speed)
                if notice:
                    self._screen.notify(clean_line(notice), severity="warning", timeout=15, markup=False)
            self.done = model.path
        except CpuchatError:  # stopped, or a model that ends at once
            if not self._stopped and model is not None:
                self.done = model.path
        finally:
            self._worker = None

    async def _answer(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        if self._stopped:
            raise MeasureFailed("Stopped.")
        async with contextlib.aclosing(self._services.conversation.generate_detached(request)) as events:
            async for event in events:
                if self._stopped:
                    await self._services.conversation.stop()  # asked for before the worker had begun
                yield event
