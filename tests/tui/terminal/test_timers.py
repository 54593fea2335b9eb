"""Tests timers that are late at their start."""

from __future__ import annotations

from tests.support.chat_app import running


async def test_a_timer_that_is_late_at_its_start_fires() -> None:
    fired: list[bool] = []
    async with running() as app:
        await app.ready()
        app.app.set_timer(1e-9, lambda: fired.append(True))  # as when its task is preempted for so long
        await app.until(lambda: fired)
