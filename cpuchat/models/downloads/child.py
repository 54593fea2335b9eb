"""The process of one download, `python -m cpuchat.models.downloads.child`: reads a `Download`, writes such lines.

Fetches all files of one model, one after the other: space checked, received, hashed, put in their place. It ends with
its last report, or with its standard input, because its parent is gone. However it ends, even by SIGKILL, it leaves
partial files that the next one resumes.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import ChecksumMismatch, CpuchatError, DownloadFailed, TooSlow
from cpuchat.base.line_process import LineOutput
from cpuchat.models.downloads.hf_cache import CachedFile, check_space, size_of, update_main, write_error
from cpuchat.models.downloads.state import Download, DownloadProgress
from cpuchat.models.hub import errors
from cpuchat.models.hub.client import BrokenResponse, WrongResponse, pieces
from cpuchat.models.hub.errors import host, is_offline
from cpuchat.models.hub.repository import HubFile, check_names
from cpuchat.models.library.deleting import file_digest

if TYPE_CHECKING:
    import httpx


T = TypeVar("T")

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524})
_MIN_PROGRESS, _ENOUGH_PROGRESS = 1 << 16, 1 << 24
"""Bytes that an attempt must deliver to count as progress: 1/64 of what is missing, within these limits. So no server
that ends each response early takes more attempts than a few hundred, or one for each 16 MiB.
"""
_WRONG_ATTEMPTS = 3


def with_retries(act: Callable[[], T], progress: DownloadProgress) -> T:
    """Call `act` until it succeeds; between attempts the state is `waiting`, with the fault in the report. Raises
    DownloadFailed: too many attempts in a row without progress, or a few with the same wrong response; CpuchatError: a
    permanent fault (see `errors.translate`), or a server that asks to wait for too long."""
    order, failures, wrong = progress.order, 0, 0
    policy, total = order.retry_policy, order.model.size
    while True:
        before = progress.done
        try:
            return act()
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:  # some of huggingface_hub's have no number
                raise write_error(error, Path(order.cache), total - progress.done) from None
            fault = errors.translate(error, order.repo)
            if isinstance(error, BrokenResponse):
                fault = DownloadFailed(error.message, "Resume, or try again later.")
            import httpx
            from huggingface_hub.errors import HfHubHTTPError

            refusal = error.response if isinstance(error, HfHubHTTPError | httpx.HTTPStatusError) else None
            if not _is_transient(error, refusal):
                raise fault from None
            if progress.done - before >= max(_MIN_PROGRESS, min((total - before) // 64, _ENOUGH_PROGRESS)):
                failures = wrong = 0
            else:
                failures += 1
                wrong += isinstance(error, WrongResponse)
            if wrong >= _WRONG_ATTEMPTS:
                raise DownloadFailed(
                    f"{fault.message} Same result in {wrong} attempts.",
                    "The repository may have changed: refresh it. Otherwise try another repository or network.",
                ) from None
            if failures >= policy.attempts:
                raise DownloadFailed(
                    f"Failed after {failures} attempts without progress. {fault.message}",
                    "The partial file is kept: resume continues from there.",
                ) from None
            retry_after = errors.seconds_to_wait(refusal.headers) if refusal is not None else None
            if retry_after is not None and retry_after > policy.max_retry_after:
                raise fault from None
            progress.attempt = failures + 1
            # Exponential, less up to half of it at random, so that clients do not all return at once.
            delay = min(policy.first_wait * 2 ** max(failures - 1, 0), policy.max_wait) * random.uniform(0.5, 1.0)
            left = delay if retry_after is None else retry_after
            until = time.monotonic() + left
            while True:
                progress.enter("waiting", error=fault, retry_in=left)
                time.sleep(min(left, 1.0))
                left = until - time.monotonic()
                if left <= 0:
                    break
            progress.enter("running")


def _is_transient(error: Exception, refusal: httpx.Response | None) -> bool:
    import httpx

    if refusal is not None:
        return refusal.status_code in _TRANSIENT
    if isinstance(error, httpx.UnsupportedProtocol) or errors.is_certificate(error):
        return False
    return isinstance(error, BrokenResponse | TooSlow | httpx.TransportError)


def transfer(
    repo: str, revision: str, file: HubFile, part: Path, *, idle_timeout: float, on_written: Callable[[int], None]
) -> None:
    """Append what is missing of `file` to `part`, in one request.

    Every piece is written as it arrives, so killing this process loses only what was still in the network. `on_written`
    gets the size of the partial file after each. Raises BrokenResponse, TooSlow, httpx.HTTPError: the transfer did not
    finish; the partial file has what arrived; HubError: a forbidden redirect, or a compressed response; OSError: the
    partial file could not be written."""
    part.parent.mkdir(parents=True, exist_ok=True)
    size = size_of(part)
    if size > file.size:  # not one of ours
        part.unlink()
        size = 0
    with part.open("ab", buffering=0) as stream:
        on_written(size)
        for piece in pieces(repo, revision, file, size, max_bytes=None, idle_timeout=idle_timeout, seconds=inf):
            rest = memoryview(piece)
            while rest:  # a disk that is getting full takes only some of it
                written = stream.write(rest)
                rest = rest[written:]
                size += written
                on_written(size)
    if size < file.size:
        raise BrokenResponse(f"{host()} closed the connection before the end of the file.")


def fetch_model(progress: DownloadProgress) -> Path:
    """Download and check all files of the order. Returns the first one, by its name in the cache. Raises CpuchatError:
    that failed; whatever arrived intact is kept."""
    order = progress.order
    files, cache = order.model.files, Path(order.cache)
    check_names(order.repo, order.revision, files)
    if is_offline():
        raise errors.offline_mode()
    progress.here.update((file.etag, CachedFile(cache, order.repo, file).here) for file in files)
    try:
        check_space(cache, order.model.size - progress.done, order.reserved)
        named = [_fetch_file(file, progress) for file in files]
        if order.newest_at:
            update_main(cache, order.repo, order.revision, order.newest_at)
    except OSError as error:
        raise write_error(error, cache) from None
    return named[0]


def _fetch_file(file: HubFile, progress: DownloadProgress) -> Path:
    """Download one file, unless it is here and correct; returns its name in the snapshot. Raises ChecksumMismatch: it
    is wrong a second time."""
    order = progress.order
    cached = CachedFile(Path(order.cache), order.repo, file)
    was_verified = file.etag in progress.verified

    on_written, on_hashed = partial(progress.written, file), partial(progress.hashed, file)

    def is_correct(path: Path) -> bool:
        """Hash the whole file, as it is on the disk. Raises OSError when it cannot be read."""
        progress.enter("checking")
        return file_digest(path, file.etag, on_hashed) == file.etag

    def receive() -> None:
        transfer(
            order.repo, order.revision, file, cached.part,
            idle_timeout=order.retry_policy.idle_timeout, on_written=on_written,
        )  # fmt: skip

    with cached.locked(progress):
        content = cached.content
        if content is not None:
            on_written(file.size)
            # The program that wrote it may not have checked it.
            if not (content == cached.blob and was_verified) and not with_retries(
                partial(is_correct, content), progress
            ):
                content = None
        for _ in range(0 if content else 2):
            on_written(size_of(cached.part))
            on_hashed(0)
            progress.enter("running")
            with_retries(receive, progress)
            if with_retries(partial(is_correct, cached.part), progress):
                with_retries(cached.move_to_blob, progress)
                content = cached.blob
                break
            with_retries(cached.part.unlink, progress)
        if content is None:
            raise ChecksumMismatch(
                f"{Path(file.path).name} failed its checksum twice and was discarded.",
                "Try again later, without a proxy if there is one, or choose another repository.",
            )
        named = cached.add_to_snapshot(order.revision, content)
    if not was_verified:
        progress.verified.append(file.etag)
    on_hashed(file.size)
    return named


def _stop(*_: object) -> None:
    """End this process: a file that is being written under a name of its own is removed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    sys.exit()


def main() -> None:
    os.nice(10)  # decoding goes first
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=prepared(Download))
    progress = DownloadProgress(order, LineOutput.claim().send)

    def end_with_input() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        signal.pthread_kill(main_thread, signal.SIGTERM)  # to that thread: it may be waiting for the network

    main_thread = threading.get_ident()
    signal.signal(signal.SIGTERM, _stop)
    threading.Thread(target=end_with_input, name="input", daemon=True).start()
    try:
        path = fetch_model(progress)
    except CpuchatError as error:
        progress.enter("failed", error=error)
    else:
        progress.enter("done", path=str(path))


if __name__ == "__main__":
    main()
