"""Text processing on its own thread, so that the engine's thread only samples and decodes.

Between two decode calls every core but one waits. Detokenizing, splitting off reasoning and sending a frame take longer
than sampling, most of all because decoding has just evicted the interpreter's data from the caches. Here they run while
the next token is computed: llama_decode does not hold the GIL. Several tokens at a time, because where all cores
compute, each wake-up of another thread takes a core away from them.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Final

from cpuchat.engine.text.text_stream import TextStream

_PAUSE: Final = 2e-4
"""Seconds between two steps of other work, in which the engine's thread gets the GIL: else it waits 5 ms for it."""


class OutputThread:
    """The thread. Create it before the engine's thread is pinned: it inherits the CPUs of its creator."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | ThreadedStream | Iterator[None] | None] = SimpleQueue()
        self.put = self._jobs.put
        self._thread = threading.Thread(target=self._run, name="text", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, ThreadedStream):
                job.done.set()
                continue
            if isinstance(job, Iterator):
                self._step(job)
                continue
            stream, runs, now = job
            if stream.error is None:
                try:
                    stream.inner.feed_all(runs, now)
                except Exception as error:
                    stream.error = error  # raised by `finish`, on the thread that waits for the answer

    def run(self, steps: Iterator[None]) -> None:
        """Take short steps of other work in Python, one at a time between texts. What is left ends with the thread."""
        self.put(steps)

    def _step(self, steps: Iterator[None]) -> None:
        try:
            next(steps)
        except StopIteration:
            return
        except Exception:  # whoever needs it sees that it was not finished; answers need this thread
            traceback.print_exc()
            return
        time.sleep(_PAUSE)
        self.put(steps)

    def close(self) -> None:
        """End the thread after the texts that are queued."""
        self._jobs.put(None)
        self._thread.join()


_Job = tuple["ThreadedStream", list[tuple[str, list[int]]], float]


class ThreadedStream:
    """A `TextStream` fed on an `OutputThread`. Not for stop strings: nothing waits for what `feed` finds."""

    def __init__(self, output_thread: OutputThread, inner: TextStream) -> None:
        self._put = output_thread.put
        self._drafter = ""
        self._tokens: list[int] = []
        self._runs: list[tuple[str, list[int]]] = [("", self._tokens)]
        self._last = 0.0
        self._next_frame = 0.0
        self.inner = inner
        self.done = threading.Event()
        self.error: Exception | None = None

    def feed(self, token: int, now: float, drafter: str = "") -> bool:
        """Add a token as `TextStream.feed`; always returns False."""
        if drafter != self._drafter:
            self._drafter, self._tokens = drafter, []
            self._runs.append((drafter, self._tokens))
        self._tokens.append(token)
        self._last = now
        # The first text does not wait, even if the first tokens had none.
        if now >= self._next_frame or not self.inner.has_emitted:
            self._next_frame = now + self.inner.frame_seconds
            self._hand_over()
        return False

    def _hand_over(self) -> None:
        runs, self._tokens = self._runs, []
        self._runs = [(self._drafter, self._tokens)]
        self._put((self, runs, self._last))

    def finish(self, now: float, *, stopped: bool) -> None:
        """Finish as `TextStream.finish`, after all that was fed. Raises the error of the other thread, if any."""
        self._hand_over()
        self._put(self)
        self.done.wait()
        if self.error is not None:
            raise self.error
        self.inner.finish(now, stopped=stopped)
