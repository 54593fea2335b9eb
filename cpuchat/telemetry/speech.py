"""Figures of reading an answer aloud. Definitions: docs/speech.md.

Pure: time comes in as an argument, in monotonic seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speech:
    """The figures of one reading; None is "not known yet".

    `engine` "": nothing is read. First audio is when the first samples go to the player: `first_audio_s` from the
    request, `after_token_s` from the first token, `after_sentence_s` from the end of the first sentence.
    `real_time_factor` is the time to synthesize ÷ the length of the sound. `queued_s` of sound is not heard yet,
    `sound_s` was synthesized. `cpus` the speech process may use; `shared`: the model computes on them too.
    `decode_tok_s` of the last answer that was read, `plain_tok_s` of the last that was not, by the same model.
    """

    engine: str = ""
    reading: bool = False
    first_audio_s: float | None = None
    after_token_s: float | None = None
    after_sentence_s: float | None = None
    real_time_factor: float | None = None
    queued_s: float = 0.0
    sound_s: float = 0.0
    cpus: tuple[int, ...] = ()
    shared: bool = False
    decode_tok_s: float | None = None
    plain_tok_s: float | None = None


class SpeechMeter:
    """Meters readings, one after the other."""

    def __init__(self) -> None:
        self.engine = ""
        self.cpus: tuple[int, ...] = ()
        self.shared = False
        self._model = ""
        self._with: float | None = None
        self._without: float | None = None
        self.begin(None)
        self._reading = False

    def begin(self, now: float | None) -> None:
        """Record that a reading begins, of a request sent `now` (None: of a text that is there)."""
        self._asked = now
        self._token: float | None = None
        self._sentence: float | None = None
        self._first: float | None = None
        self._sound = self._took = 0.0
        self._waiting = 0.0  # seconds of sound that the player does not have
        self._until = 0.0  # when the player will have nothing left
        self._reading = True

    def token(self, now: float) -> None:
        """Record text of the answer; the first counts."""
        if self._token is None:
            self._token = now

    def sentence(self, now: float) -> None:
        """Record that a sentence is complete; the first counts."""
        if self._sentence is None:
            self._sentence = now

    def synthesized(self, seconds: float, took: float) -> None:
        """Record that `seconds` of sound took so long to synthesize."""
        self._sound += seconds
        self._took += took
        self._waiting += seconds

    def played(self, seconds: float, now: float, *, paced: bool) -> None:
        """Record that the player was given `seconds` of sound; `paced`: it takes as long to play them."""
        if self._first is None:
            self._first = now
        self._waiting = max(0.0, self._waiting - seconds)
        if paced:
            self._until = max(self._until, now) + seconds

    def end(self) -> None:
        """Record that nothing is being read any more."""
        self._reading = False
        self._waiting = self._until = 0.0

    def answered(self, model: str, tok_s: float | None, *, read: bool) -> None:
        """Record the decoding speed of an answer; one of another model clears those before."""
        if model != self._model:
            self._model, self._with, self._without = model, None, None
        if tok_s is not None and read:
            self._with = tok_s
        elif tok_s is not None:
            self._without = tok_s

    def queued(self, now: float) -> float:
        """Return the seconds of sound that are not heard yet."""
        return self._waiting + max(0.0, self._until - now)

    def figures(self, now: float) -> Speech:
        """Return the current figures."""

        def since(start: float | None) -> float | None:
            return None if self._first is None or start is None else max(0.0, self._first - start)

        return Speech(
            engine=self.engine,
            reading=self._reading,
            first_audio_s=since(self._asked),
            after_token_s=since(self._token),
            after_sentence_s=since(self._sentence),
            real_time_factor=self._took / self._sound if self._sound else None,
            queued_s=self.queued(now),
            sound_s=self._sound,
            cpus=self.cpus,
            shared=self.shared,
            decode_tok_s=self._with,
            plain_tok_s=self._without,
        )
