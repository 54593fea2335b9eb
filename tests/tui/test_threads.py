"""Tests blocking calls beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cpuchat.base.errors import HubOffline
from cpuchat.base.processes import run_in_daemon_thread


def test_a_call_that_hangs_keeps_neither_its_caller_nor_the_program_waiting() -> None:
    never, started, ended = threading.Event(), threading.Event(), threading.Event()

    async def main() -> None:
        with pytest.raises(HubOffline):
            await run_in_daemon_thread(_fail)
        task = asyncio.create_task(run_in_daemon_thread(lambda: (started.set(), never.wait(), ended.set())))
        while not started.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())  # waits for the threads of its executor, before it returns
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "daemon-call"] == [True]
    never.set()
    assert ended.wait(60)  # nothing was raised in it


def _fail() -> None:
    raise HubOffline("No connection.")
