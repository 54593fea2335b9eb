"""Which network faults are retried, and after how long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cpuchat.errors import CpuchatError, DownloadFailed, TooSlow
from cpuchat.models.downloads.progress import Progress
from cpuchat.models.downloads.space import write_error
from cpuchat.models.downloads.state import Order, RetryPolicy
from cpuchat.models.hub import errors

T = TypeVar("T")

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})
_MIN_PROGRESS, _ENOUGH_PROGRESS = 1 << 16, 1 << 24
"""Bytes that an attempt must deliver to count as progress: 1/64 of what is missing, within these limits. So no server
that ends each response early takes more attempts than a few hundred, or one for each 16 MiB.
"""
_WRONG_ATTEMPTS, _EARLY_ENDS = 3, 5


class BrokenResponse(Exception):
    """A response that is not the requested file but may be at the next attempt: truncated, or a web page."""


class WrongResponse(BrokenResponse):
    """A response with another length, range or hash than was listed: probably the same at every attempt."""


def with_retries(act: Callable[[], T], order: Order, progress: Progress) -> T:
    """Call `act` until it succeeds; between attempts the state is `waiting`, with the fault in the report.

    Raises:
        DownloadFailed: too many attempts in a row without progress, or a few with the same wrong response or with one
            that ended early.
        CpuchatError: a permanent fault (see `errors.translate`), or a server that asks to wait for too long.
    """
    import httpx

    policy, failures, wrong, ended_early = order.retry_policy, 0, 0, 0
    total = sum(file.size for file in order.files)
    while True:
        before = progress.done
        try:
            return act()
        except Exception as error:
            fault = _fault(error, order, progress)
            if not _is_transient(error):
                raise fault from None
            if progress.done - before >= max(_MIN_PROGRESS, min((total - before) // 64, _ENOUGH_PROGRESS)):
                failures = wrong = ended_early = 0
            else:
                failures += 1
                ended_early += isinstance(error, BrokenResponse | httpx.RemoteProtocolError)
                wrong += isinstance(error, WrongResponse)
            if wrong >= _WRONG_ATTEMPTS:
                raise DownloadFailed(
                    f"{fault.message} Same result in {wrong} attempts.",
                    "The repository may have changed: refresh it. Otherwise try another repository or network.",
                ) from None
            if failures >= policy.attempts or ended_early >= _EARLY_ENDS:
                raise DownloadFailed(
                    f"Failed after {failures} attempts without progress. {fault.message}",
                    "The partial file is kept: resume continues from there.",
                ) from None
            retry_after = _retry_after(error)
            if retry_after is not None and retry_after > policy.max_retry_after:
                raise fault from None
            progress.attempt = failures + 1
            _wait(_back_off(failures, policy) if retry_after is None else retry_after, fault, progress)


def _fault(error: Exception, order: Order, progress: Progress) -> CpuchatError:
    if isinstance(error, OSError) and error.errno is not None:  # some of huggingface_hub's errors are without a number
        missing = sum(file.size for file in order.files) - progress.done
        return write_error(error, Path(order.cache), missing)
    if isinstance(error, BrokenResponse):
        return DownloadFailed(str(error), "Resume, or try again later.")
    return errors.translate(error, order.repo)


def _is_transient(error: Exception) -> bool:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError | httpx.HTTPStatusError):
        return error.response.status_code in _TRANSIENT
    if isinstance(error, httpx.UnsupportedProtocol) or errors.is_certificate(error):
        return False
    return isinstance(error, BrokenResponse | TooSlow | httpx.TransportError)


def _retry_after(error: Exception) -> float | None:
    """Seconds that the server asks to wait; None when it does not say."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    refused = isinstance(error, HfHubHTTPError | httpx.HTTPStatusError)
    return errors.seconds_to_wait(error.response.headers) if refused else None


def _back_off(failures: int, policy: RetryPolicy) -> float:
    """Return the delay in seconds: exponential, less up to half of it at random, so that clients do not all return at
    once.
    """
    return min(policy.first_wait * 2 ** max(failures - 1, 0), policy.max_wait) * random.uniform(0.5, 1.0)


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
