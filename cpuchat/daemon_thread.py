"""Runs a blocking call in a thread that does not delay the exit."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(function: Callable[[], T]) -> T:
    """Run `function` in a separate daemon thread; returns or raises what it does.

    Unlike an executor's, the thread does not delay the exit: when cancelled, this returns at once, and the program
    can exit meanwhile.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, problem = None, None
        try:
            result = function()
        except BaseException as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name="daemon-call", daemon=True).start()
    return await future
