"""The HTTP client behind huggingface_hub, with limits: its own waits for ever, and so does `HfApi.list_models`.

Imports httpx, which takes its time: to be imported only by who asks the hub.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx

from cpuchat.errors import HubError
from cpuchat.models.hub.environment import host
from cpuchat.models.hub.errors import too_slow

_SILENCE = 20.0
"""Seconds without a byte after which we give up; half of it for the connection itself."""
_LONGEST = 120.0
"""Seconds that one answer may take as a whole."""
_MAX_ANSWER = 128 << 20


def client() -> httpx.Client:
    """For `huggingface_hub.set_client_factory`. Follows redirects; the token goes to no other host.

    Reading an answer raises HubOffline when it takes too long, and HubError when it gets too large.
    """
    hooks = {"request": [_limit_silence], "response": [_limit_answer]}
    return httpx.Client(event_hooks=hooks, follow_redirects=True)


def _limit_silence(request: httpx.Request) -> None:
    # Not as the client's default: huggingface_hub asks for no timeout in so many words.
    request.extensions["timeout"] = httpx.Timeout(_SILENCE, connect=_SILENCE / 2).as_dict()


def _limit_answer(response: httpx.Response) -> None:
    assert isinstance(response.stream, httpx.SyncByteStream)
    response.stream = _Limited(response.stream)


class _Limited(httpx.SyncByteStream):
    def __init__(self, answer: httpx.SyncByteStream) -> None:
        self._answer = answer
        self._until = time.monotonic() + _LONGEST

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for piece in self._answer:
            size += len(piece)
            if time.monotonic() > self._until:
                raise too_slow()
            if size > _MAX_ANSWER:
                raise HubError(f"{host()} answered with more than {_MAX_ANSWER >> 20} MiB.", "Ask for less.")
            yield piece

    def close(self) -> None:
        self._answer.close()
