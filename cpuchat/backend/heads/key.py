"""The API key of a llama-server that cpuchat started itself: made for it, and kept in memory only."""

from __future__ import annotations

from cpuchat.backend.remote.keys import KeyRing


class OwnKey(KeyRing):
    """A key ring with one key, whatever the server."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._own = key

    def key(self, server: str) -> str:
        return self._own
