"""Drafts while the target verifies, on separate cores (draft-ahead, as in PEARL, arXiv 2408.11850).

While the target verifies one block the draft model drafts the next one, assuming that all of the block is accepted:
first its guess of the token that the target will add, then a new draft. If the assumption holds, the next pass starts
at once; if not, what was drafted ahead is dropped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from cpuchat.engine.drafting.draft_model import DraftModel
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.engine.llama.threads import ThreadPool
from cpuchat.errors import GenerationFailed

T = TypeVar("T")


class DraftThread:
    """A thread with its own cores for the draft model.

    The draft model computes either here (`is_on`), or on the shared cores (on the engine's thread, sequentially with
    the target). Create it on the engine's thread. Raises GenerationFailed when its threads cannot be started.

    Args:
        cpus: the draft's cores.
        target_cpus: the target's cores while the draft computes here; None: the target never uses the draft's.

    Attributes:
        always: the draft model never computes on the shared cores.
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
        poll = target.options.poll
        self._target_pool = ThreadPool(target_cpus, poll) if target_cpus is not None else None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="draft")
        try:
            self._pool = self._executor.submit(ThreadPool, cpus, poll).result()
        except BaseException:
            self._executor.shutdown()
            if self._target_pool is not None:
                self._target_pool.free()
            raise
        self._shared.attach(target.sequence.context)  # making a pool has pinned this thread
        self._ahead: Future[list[int]] | None = None
        self._stop = threading.Event()
        self.is_on = False
        if self.always:
            self.switch(True)

    def switch(self, on: bool) -> None:
        """Switch between separate cores for both models and sequential use of all cores."""
        if on == self.is_on:
            return
        self.drop()
        self.is_on = on
        if on:
            self._executor.submit(self._pool.attach, self._draft.sequence.context).result()
            if self._target_pool is not None:
                self._target_pool.attach(self._target.sequence.context)
        else:
            self._shared.attach(self._draft.sequence.context)
            self._shared.attach(self._target.sequence.context)

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` of the draft model on the thread that owns its cores."""
        self.drop()
        return self._executor.submit(work).result() if self.is_on else work()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Start `work` of the draft model in the background. Only while `is_on`."""
        return self._executor.submit(work)

    def draft_ahead(self, drafted: list[int], n: int, min_probability: float) -> None:
        """Draft ahead after `drafted`, which is being verified: a guess of the target's token, then `n` more."""
        self.drop()
        self._stop.clear()
        self._ahead = self._executor.submit(
            self._drafter.draft_ahead, drafted, n + 1, min_probability, self._stop.is_set
        )

    def take(self, is_accepted: bool) -> list[int]:
        """End the drafting ahead and return its tokens; none, and at once, if the block was not fully accepted.

        Raises:
            Aborted, GenerationFailed: as `DraftModel.propose`.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return []
        if not is_accepted:
            self._stop.set()
        tokens = ahead.result()
        return tokens if is_accepted else []

    def drop(self) -> None:
        """End the drafting ahead and drop its tokens."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._stop.set()
            ahead.exception()

    def close(self, *, models_stay: bool = False) -> None:
        """End the thread and share the cores again. Call it before either model is freed.

        Args:
            models_stay: both models compute again later. Their sequences are emptied.
        """
        self.drop()
        for model in (self._draft, self._target):
            self._shared.attach(model.sequence.context)
            if models_stay:
                # The next pass pauses the pool of the one before (ggml_backend_cpu_set_threadpool in ggml-cpu.cpp), so
                # that pool must still exist. A pass that fails has done it too.
                with contextlib.suppress(Aborted, GenerationFailed):
                    model.sequence.step(0)
                model.sequence.clear()
        self._executor.submit(self._pool.free).result()
        self._executor.shutdown()
        if self._target_pool is not None:
            self._target_pool.free()
