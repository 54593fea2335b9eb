"""An n-gram index over a growing text, used by prompt lookup and suffix decoding."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from cpuchat.prefix import common_prefix

_BASE: Final = (1 << 20) + 7
_MASK: Final = (1 << 61) - 1
NOWHERE: Final = -1


class NgramIndex:
    """Hash index over the n-grams of a growing text; O(number of sizes) for a token appended or removed.

    For every size a dictionary maps an n-gram's key to the position of its last token where it occurred last, and an
    array maps every position to the occurrence before. Keys are polynomial hashes of 61 bits (exact up to three tokens
    below a million). A collision gives a wrong draft, which verification rejects. About 75 bytes per token and size.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: lengths of the n-grams, at least 1 each."""
        self.sizes: Final = tuple(sorted(set(sizes)))
        self._clear()

    def _clear(self) -> None:
        self.text = array("i")
        self.previous = {size: array("i") for size in self.sizes}
        self._last: dict[int, dict[int, int]] = {size: {} for size in self.sizes}
        self._keys: list[int] = []

    def __len__(self) -> int:
        return len(self.text)

    def set_text(self, text: Sequence[int]) -> None:
        """Replace the text; the prefix that it shares with the one before stays indexed."""
        new = array("i", text)
        self.truncate(common_prefix(self.text, new))
        self.extend(new[len(self.text) :])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens`."""
        keys, longest = self._keys, self.sizes[-1]
        tables = [(size - 1, self._last[size], self.previous[size]) for size in self.sizes]
        position = len(self.text)
        for token in tokens:
            keys = [token & _MASK, *((key * _BASE + token) & _MASK for key in keys[: longest - 1])]
            known = len(keys)
            for i, last, previous in tables:
                if i < known:
                    key = keys[i]
                    previous.append(last.get(key, NOWHERE))
                    last[key] = position
                else:
                    previous.append(NOWHERE)
            position += 1
        self.text.extend(tokens)
        self._keys = keys

    def truncate(self, length: int) -> None:
        """Remove what follows the first `length` tokens."""
        removed = len(self.text) - length
        if removed <= 0:
            return
        if removed > length:
            kept = self.text[:length]
            self._clear()
            self.extend(kept)
            return
        for position in range(len(self.text) - 1, length - 1, -1):
            keys = self._keys_at(position)
            for size in self.sizes:
                if size > len(keys):
                    break
                before = self.previous[size].pop()
                if before == NOWHERE:
                    del self._last[size][keys[size - 1]]
                else:
                    self._last[size][keys[size - 1]] = before
        del self.text[length:]
        for previous in self.previous.values():
            del previous[length:]
        self._keys = self._keys_at(length - 1)

    def match(self) -> tuple[int, int]:
        """Return the longest size whose n-gram at the end of the text occurred before, and its end; (0, -1): none."""
        for size in reversed(self.sizes):
            previous = self.previous[size]
            if previous and previous[-1] != NOWHERE:
                return size, previous[-1]
        return 0, NOWHERE

    def key(self, size: int) -> int | None:
        """Return the key of the last `size` tokens, for `last` of another index; None: the text is shorter."""
        return self._keys[size - 1] if size <= len(self._keys) else None

    def last(self, size: int, key: int) -> int:
        """Return the end of the last occurrence of the n-gram with this key; `NOWHERE`: none."""
        return self._last[size].get(key, NOWHERE)

    def _keys_at(self, position: int) -> list[int]:
        """Return the keys of the 1-gram, 2-gram, ... that end at `position`, as `extend` computes them."""
        keys, factor = [], 1
        key = 0
        for token in reversed(self.text[max(0, position + 1 - self.sizes[-1]) : position + 1]):
            key = (key + token * factor) & _MASK
            keys.append(key)
            factor = (factor * _BASE) & _MASK
        return keys
