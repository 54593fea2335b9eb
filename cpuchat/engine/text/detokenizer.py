"""From tokens to text without splitting UTF-8 sequences."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """Detokenizes incrementally.

    A UTF-8 sequence that continues in the next token waits for it. Invalid UTF-8 becomes U+FFFD.

    Args:
        piece_of: returns the bytes of one token; called once per distinct token.
    """

    def __init__(self, piece_of: Callable[[int], bytes]) -> None:
        self._piece_of = piece_of
        self._pieces: dict[int, bytes] = {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Return the text that is complete with this token; may be empty."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece_of(token)
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """Return what is left of an unfinished character (U+FFFD), and start afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
