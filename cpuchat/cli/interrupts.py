"""Runs a long measurement until it ends or Ctrl+C stops it."""

from __future__ import annotations

import asyncio
import signal
from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Stoppable(Protocol[T_co]):
    """Something that runs for minutes. `kill` does not wait for its worker."""

    async def run(self) -> T_co: ...

    async def stop(self, *, kill: bool = False) -> None: ...


async def run_stoppable(running: Stoppable[T_co]) -> T_co:
    """Run it; the first Ctrl+C stops it, a second one kills its worker."""
    loop, presses = asyncio.get_running_loop(), 0
    stopping: set[asyncio.Task[None]] = set()

    def interrupt() -> None:
        nonlocal presses
        presses += 1
        task = asyncio.ensure_future(running.stop(kill=presses > 1))
        stopping.add(task)
        task.add_done_callback(stopping.discard)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await running.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
