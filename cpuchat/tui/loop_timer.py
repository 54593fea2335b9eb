"""A timer of the event loop: Textual's never fires when it is late at its start, as on a busy machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LoopTimer:
    """Calls a function once, later. It can be started again from there on."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float) -> None:
        """Call it after `seconds`, at once if that is less than 0; nothing happens while the timer runs."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(max(0.0, seconds), self._fire)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._call()
