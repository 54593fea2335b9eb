"""The queue before the engine: so many requests run at once, and clients take turns for the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class QueueTurn:
    """The place of one request in the queue, then its `slot` (from 0 on) among those that run."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.slot = -1
        self.begun = asyncio.Event()


class FairQueue:
    """Lets `n_slots` requests run at once. The next one is of the client whose last turn is the longest ago: nobody
    waits behind several of another one's. Use from one event loop."""

    def __init__(self, n_slots: int = 1) -> None:
        self.n_slots = n_slots
        self._running: dict[int, QueueTurn] = {}  # by slot
        self._waiting: dict[str, deque[QueueTurn]] = {}  # by client
        self._n_begun = 0
        self._last: dict[str, int] = {}  # the number of the last turn of each client that is here, or that it came at

    @property
    def n_running(self) -> int:
        return len(self._running)

    def resize(self, n_slots: int) -> None:
        """Let so many requests run at once from now on."""
        self.n_slots = n_slots
        self._begin_turns()

    @contextlib.asynccontextmanager
    async def slot(self, turn: QueueTurn) -> AsyncIterator[None]:
        """Wait for the turn of a request, which lasts as long as the block."""
        self._waiting.setdefault(turn.client, deque()).append(turn)
        # Just before the turn that began last: one that leaves and comes back passes nobody who waits.
        self._last.setdefault(turn.client, self._n_begun - 1)
        self._begin_turns()
        try:
            await turn.begun.wait()
            yield
        finally:
            if turn.begun.is_set():  # also of one that leaves at this moment
                del self._running[turn.slot]
                self._begin_turns()
            else:
                self._leave(turn)
            if turn.client not in self._waiting and all(one.client != turn.client for one in self._running.values()):
                del self._last[turn.client]

    def _leave(self, turn: QueueTurn) -> None:
        self._waiting[turn.client].remove(turn)
        if not self._waiting[turn.client]:
            del self._waiting[turn.client]

    def _begin_turns(self) -> None:
        while len(self._running) < self.n_slots and self._waiting:
            turn = self._waiting[min(self._waiting, key=self._last.__getitem__)][0]
            self._leave(turn)
            self._n_begun += 1
            self._last[turn.client] = self._n_begun
            turn.slot = next(slot for slot in range(self.n_slots) if slot not in self._running)
            self._running[turn.slot] = turn
            turn.begun.set()
