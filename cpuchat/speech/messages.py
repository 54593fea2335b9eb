"""The messages of the speech process: one request for each sentence, one answer with its sound."""

from __future__ import annotations

import msgspec


class Synthesize(msgspec.Struct, frozen=True, kw_only=True):
    """Speak `text`, one sentence."""

    id: int
    text: str


class VoiceReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The first answer: the voice is loaded. `rate` in samples per second."""

    rate: int


class Sound(msgspec.Struct, frozen=True, kw_only=True, tag="sound"):
    """A sentence: 16-bit mono samples, little-endian."""

    id: int
    samples: bytes


Answer = VoiceReady | Sound
