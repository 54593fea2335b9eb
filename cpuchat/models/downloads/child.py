"""The process of one download, `python -m cpuchat.models.downloads.child`: reads an `Order`, writes `Report` lines.

It ends on SIGTERM, when its standard input ends because its parent is gone, and after its last report. However it ends,
even by SIGKILL, it leaves partial files that the next one resumes.
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
from cpuchat.models.downloads.fetch import fetch_model
from cpuchat.models.downloads.hf_cache import bytes_here
from cpuchat.models.downloads.progress import Progress
from cpuchat.models.downloads.state import Order, Report

_NICENESS = 10  # decoding goes first


class _Stopped(BaseException):
    """Raised by SIGTERM. Not an Exception, so that no handler takes it for a network fault."""


def main() -> None:
    os.nice(_NICENESS)
    signal.signal(signal.SIGTERM, _stop)
    progress = Progress(_send)
    order: Order | None = None
    try:
        order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
        progress.verified += order.verified
        threading.Thread(target=_watch_input, name="input", daemon=True).start()
        threading.Thread(target=progress.report_by_clock, name="clock", daemon=True).start()
        try:
            path = fetch_model(order, progress)
        except CpuchatError as error:
            progress.enter("failed", error=error)
        else:
            progress.enter("done", path=str(path))
    except _Stopped:
        if order is not None:
            # The signal may have come between writing a piece and counting it.
            with contextlib.suppress(CpuchatError):
                progress.begin_file(0, bytes_here(Path(order.cache), order.repo, order.files))
        progress.enter("paused")


def _stop(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise _Stopped


def _watch_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGTERM)  # to that thread: it may be waiting for the network


def _send(report: Report) -> None:
    # When the parent is gone, standard input ends, too.
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), msgspec.json.encode(report) + b"\n")  # at once: no half line when stopped


if __name__ == "__main__":
    main()
