"""Which faults of the network pass, and how long to wait for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cpuchat.errors import CpuchatError, DownloadFailed, TooSlow
from cpuchat.models.downloads.progress import Progress
from cpuchat.models.downloads.space import write_error
from cpuchat.models.downloads.wire import Order, Patience
from cpuchat.models.hub import errors

T = TypeVar("T")

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})


_LEAST_PROGRESS = 1 << 16
"""Bytes that a try must bring to count as progress; the last bytes of a file are always enough."""
_WRONG_TRIES = 3


class BrokenAnswer(Exception):
    """An answer that is not the file asked for, and may be one at the next try: cut short, a web page."""


class WrongAnswer(BrokenAnswer):
    """One of another length, piece or hash than was listed, or none: likely the same at every try."""


def with_retries(act: Callable[[], T], order: Order, progress: Progress) -> T:
    """Call `act` until it succeeds; between the tries the state is `waiting`, with the fault in the report.

    Raises:
        DownloadFailed: too many tries in a row brought hardly a byte, or a few the same wrong answer.
        CpuchatError: a fault that does not pass (see `errors.translate`), or one that asks to wait for too long.
    """
    patience, failures, wrong = order.patience, 0, 0
    while True:
        before = progress.here
        try:
            return act()
        except Exception as error:
            fault = _fault(error, order, progress)
            if not _passes(error):
                raise fault from None
            if progress.here - before >= _LEAST_PROGRESS:
                failures = wrong = 0
            else:
                failures += 1
                wrong += isinstance(error, WrongAnswer)
            if wrong >= _WRONG_TRIES:
                raise DownloadFailed(
                    f"{fault.message} {wrong} tries brought the same.",
                    "The repository may have changed: list it again. Else choose another one, or another network.",
                ) from None
            if failures >= patience.tries:
                raise DownloadFailed(
                    f"{failures} tries in a row brought nothing. {fault.message}",
                    "What arrived is kept: resume goes on from there.",
                ) from None
            told = _told(error)
            if told is not None and told > patience.told:
                raise fault from None
            progress.attempt = failures + 1
            _wait(_back_off(failures, patience) if told is None else told, fault, progress)


def _fault(error: Exception, order: Order, progress: Progress) -> CpuchatError:
    if isinstance(error, OSError) and error.errno is not None:  # huggingface_hub's errors are some without a number
        missing = sum(file.size for file in order.files) - progress.done
        return write_error(error, Path(order.cache), missing)
    if isinstance(error, BrokenAnswer):
        return DownloadFailed(str(error), "Resume it, or try again later.")
    return errors.translate(error, order.repo)


def _passes(error: Exception) -> bool:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError | httpx.HTTPStatusError):
        return error.response.status_code in _PASSING
    if isinstance(error, httpx.UnsupportedProtocol) or errors.is_certificate(error):
        return False
    return isinstance(error, BrokenAnswer | TooSlow | httpx.TransportError)


def _told(error: Exception) -> float | None:
    """How long the server asks to wait; None when it doesn't say."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    refused = isinstance(error, HfHubHTTPError | httpx.HTTPStatusError)
    return errors.seconds_to_wait(error.response.headers) if refused else None


def _back_off(failures: int, patience: Patience) -> float:
    """Doubling, and up to a half shorter by chance: many who lost the same server don't come back all at once."""
    return min(patience.first * 2 ** max(failures - 1, 0), patience.longest) * random.uniform(0.5, 1.0)


def _wait(seconds: float, fault: CpuchatError, progress: Progress) -> None:
    until = time.monotonic() + seconds
    left = seconds
    while True:
        progress.enter("waiting", error=fault, retry_in=left)
        time.sleep(min(left, 1.0))
        left = until - time.monotonic()
        if left <= 0:
            break
    progress.enter("running")
