"""From tokens to text without ever cutting a character in two."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """Turns tokens into text as they come.

    A token's piece may end in the middle of a UTF-8 sequence; those bytes wait for the next one. Bytes that are no
    UTF-8 become U+FFFD.

    Args:
        piece_of: the bytes of one token; called once per distinct token.
    """

    def __init__(self, piece_of: Callable[[int], bytes]) -> None:
        self._piece_of = piece_of
        self._pieces: dict[int, bytes] = {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Text that is complete with this token; may be empty."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece_of(token)
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What is left of an unfinished character (U+FFFD), and a fresh start."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
