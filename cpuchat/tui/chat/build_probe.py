"""Measures the loaded model once per build of the engine, while the app is idle, and reports when it got slower."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from textual.screen import Screen

from cpuchat.base.errors import CpuchatError, MeasureFailed
from cpuchat.base.text import clean_line
from cpuchat.protocol.messages import AnyEvent, Generate
from cpuchat.tui.chat.idle import IdleProbe
from cpuchat.tui.services import Services

CHECK_SECONDS = 5.0
IDLE_CHECKS = 4
"""Consecutive checks that must find the app and the cores idle."""


class BuildProbe(IdleProbe):
    """Measures in the place of an answer.

    Args:
        is_idle: a model is loaded and nothing runs.
    """

    name = "build-probe"

    def __init__(self, screen: Screen[Any], services: Services, is_idle: Callable[[], bool]) -> None:
        super().__init__(screen, services, is_idle, CHECK_SECONDS, IDLE_CHECKS)
        self.done = ""
        """Return the path of the model that was measured, or cannot be."""

    def _is_wanted(self) -> bool:
        model = self._services.conversation.model
        return model is not None and not (model.server or model.engine) and model.path != self.done

    async def _cancel(self) -> None:
        await self._services.conversation.stop()

    async def _measure(self) -> None:
        from cpuchat.tune.measurer import BuildSpeeds, is_measured, measure_build, speed_key

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

    async def _answer(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        if self._stopped:
            raise MeasureFailed("Stopped.")
        async with contextlib.aclosing(self._services.conversation.generate_detached(request)) as events:
            async for event in events:
                if self._stopped:
                    await self._services.conversation.stop()  # asked for before the worker had begun
                yield event
