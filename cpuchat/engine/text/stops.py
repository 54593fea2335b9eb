"""Stop strings in streamed text."""

from __future__ import annotations


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of one of `markers`."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


class StopMatcher:
    """Finds the first complete stop string, however the text is split into pieces.

    Text that could be the beginning of a stop string is held back until the next piece. The stop string itself, and
    what follows it, is never returned. When two stop strings end at the same place the longer one counts.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""
        self._hit = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Return text that is safe to show, and whether a stop string was found (now or before)."""
        if self._hit or not self._stops:
            return ("" if self._hit else text), self._hit
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._hit, self._held = True, ""
            return text[: min(ends)[1]], True
        cut = len(text) - held_back(text, self._stops)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Return the text held back, when nothing more comes."""
        rest, self._held = self._held, ""
        return rest
