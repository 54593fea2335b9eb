"""The process of one download, `python -m cpuchat.models.downloads.child`: see `wire` for what goes in and out.

It ends when it is told to (SIGTERM), when its standard input ends because whoever started it is gone, and after its
last report. Ended in any way, even by SIGKILL, it leaves parts that the next one goes on with.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import msgspec

from cpuchat.errors import CpuchatError
from cpuchat.models.downloads.layout import bytes_here
from cpuchat.models.downloads.model import fetch_model
from cpuchat.models.downloads.progress import Progress
from cpuchat.models.downloads.wire import Order, Report

_NICENESS = 10  # an answer that is being written goes first


class _Stopped(BaseException):
    """Told to stop. No Exception: nothing on the way up takes it for a fault of the network."""


def main() -> None:
    os.nice(_NICENESS)
    signal.signal(signal.SIGTERM, _stop)
    progress = Progress(_say)
    order: Order | None = None
    try:
        order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
        progress.verified += order.verified
        threading.Thread(target=_watch_input, name="input", daemon=True).start()
        threading.Thread(target=progress.tell_by_clock, name="clock", daemon=True).start()
        try:
            path = fetch_model(order, progress)
        except CpuchatError as error:
            progress.enter("failed", error=error)
        else:
            progress.enter("done", path=str(path))
    except _Stopped:
        if order is not None:
            _count_again(order, progress)
        progress.enter("paused")


def _count_again(order: Order, progress: Progress) -> None:
    """Being told to stop may come between writing a piece and counting it."""
    with contextlib.suppress(CpuchatError):
        progress.begin_file(0, bytes_here(Path(order.cache), order.repo, order.files))


def _stop(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise _Stopped


def _watch_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGTERM)  # to that thread: it may be waiting for the network


def _say(report: Report) -> None:
    # When nobody listens any more, standard input ends, too.
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), msgspec.json.encode(report) + b"\n")  # at once: no half line when told to stop


if __name__ == "__main__":
    main()
