"""Drafting at the same time as the target verifies, on cores of its own (draft-ahead, as in PEARL, arXiv 2408.11850).

While the target checks one block the draft model already writes the next one, on the assumption that all of the block
is right: first its guess of the token that the target will add, then a new draft. If the assumption holds, the next
pass starts at once; if not, what was drafted ahead is thrown away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from cpuchat.engine.drafting.draft_model import DraftModel
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.threads import ThreadPool

T = TypeVar("T")


class DraftThread:
    """A thread with cores of its own for the draft model, and the cores that are left for the target.

    The draft model computes either on the shared cores (on the engine's thread, in turn with the target) or here;
    `is_on` tells which. Make it on the engine's thread.

    Args:
        cpus: the draft's cores.
        target_cpus: the target's cores while the draft computes here; None: it has no others anyway.
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        drafter: DraftModel,
        cpus: tuple[int, ...],
        target_cpus: tuple[int, ...] | None,
    ) -> None:
        self._target = target
        self._draft = draft
        self._drafter = drafter
        self.cpus = cpus
        self.always = target_cpus is None
        self._shared = target.pool
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="draft")
        poll = target.options.poll
        self._pool = self._executor.submit(ThreadPool, cpus, poll).result()
        self._target_pool = ThreadPool(target_cpus, poll) if target_cpus is not None else None
        self._shared.attach(target.sequence.context)  # making a pool has pinned this thread
        self._ahead: Future[list[int]] | None = None
        self._stop = threading.Event()
        self.is_on = False
        if self.always:
            self.switch(True)

    def switch(self, on: bool) -> None:
        """Let both models compute on cores of their own, or in turn on all of them."""
        if on == self.is_on:
            return
        self.drop()
        self.is_on = on
        if on:
            self._executor.submit(self._draft.use_pool, self._pool).result()
            if self._target_pool is not None:
                self._target.use_pool(self._target_pool)
        else:
            self._draft.use_pool(self._shared)
            self._target.use_pool(self._shared)

    def run(self, work: Callable[[], T]) -> T:
        """`work` of the draft model, on the thread that its cores belong to."""
        self.drop()
        return self._executor.submit(work).result() if self.is_on else work()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """`work` of the draft model, while the caller does something else. Only while `is_on`."""
        return self._executor.submit(work)

    def draft_ahead(self, drafted: list[int], n: int, min_probability: float) -> None:
        """Go on after `drafted` (which is to be verified now): a guess of the target's token, then `n` more."""
        self.drop()
        self._stop.clear()
        self._ahead = self._executor.submit(
            self._drafter.draft_ahead, drafted, n + 1, min_probability, self._stop.is_set
        )

    def take(self, is_right: bool) -> list[int]:
        """End the drafting ahead and return what came of it; if the block was refused, at once and nothing.

        Raises:
            Aborted, GenerationFailed: as `DraftModel.propose`.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return []
        if not is_right:
            self._stop.set()
        tokens = ahead.result()
        return tokens if is_right else []

    def drop(self) -> None:
        """End the drafting ahead, whatever came of it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._stop.set()
            ahead.exception()

    def close(self) -> None:
        """End the thread and free the cores; before either model is freed. Both models then share cores again."""
        self.drop()
        self._draft.use_pool(self._shared)
        self._target.use_pool(self._shared)
        self._executor.submit(self._pool.free).result()
        self._executor.shutdown()
        if self._target_pool is not None:
            self._target_pool.free()
