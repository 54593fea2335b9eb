"""Figures of reading an answer aloud. Definitions: docs/speech.md.

Pure: time comes in as an argument, in monotonic seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speech:
    """The figures of one reading; None is "not known yet".

    First audio is when the first samples go to the player: `first_audio_s` from the request, `after_token_s` from the
    first token.
    `real_time_factor` is the time to synthesize ÷ the length of the sound. `queued_s` of sound is not heard yet,
    `sound_s` was synthesized. `cpus` the speech process may use; `shared`: the model computes on them too.
    """

    reading: bool = False
    first_audio_s: float | None = None
    after_token_s: float | None = None
    real_time_factor: float | None = None
    queued_s: float = 0.0
    sound_s: float = 0.0
    cpus: tuple[int, ...] = ()
    shared: bool = False


class SpeechMeter:
    """Meters readings, one after the other."""

    def __init__(self) -> None:
        self.cpus: tuple[int, ...] = ()
        self.shared = False
        self.begin(None)
        self._reading = False

    def begin(self, now: float | None) -> None:
        """Record that a reading begins, of a request sent `now` (None: of a text that is there)."""
        self._asked = now
        self._token: float | None = None
        self._first: float | None = None
        self._sound = self._took = 0.0
        self._until = 0.0  # when the player will have nothing left
        self._reading = True

    def token(self, now: float) -> None:
        """Record text of the answer; the first counts."""
        self._token = now if self._token is None else self._token

    def played(self, seconds: float, took: float, now: float, *, paced: bool) -> None:
        """Record that the player was given `seconds` of sound that took so long to synthesize; `paced`: it takes as
        long to play them.
        """
        self._first = now if self._first is None else self._first
        self._sound += seconds
        self._took += took
        if paced:
            self._until = max(self._until, now) + seconds

    def end(self) -> None:
        """Record that nothing is being read any more."""
        self._reading, self._until = False, 0.0

    def figures(self, now: float) -> Speech:
        """Return the current figures."""

        def since(start: float | None) -> float | None:
            return None if self._first is None or start is None else max(0.0, self._first - start)

        return Speech(
            reading=self._reading,
            first_audio_s=since(self._asked),
            after_token_s=since(self._token),
            real_time_factor=self._took / self._sound if self._sound else None,
            queued_s=max(0.0, self._until - now),
            sound_s=self._sound,
            cpus=self.cpus,
            shared=self.shared,
        )
