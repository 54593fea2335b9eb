"""Which characters a vocabulary covers: all, except for some SentencePiece ones without byte tokens.

llama.cpp tokenizes a character that is no token byte by byte, and ends the process where there is no token for a byte
(llama_vocab::byte_to_token throws, and nothing catches it). SentencePiece itself uses its unknown token.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpuchat.models.gguf.arrays import LazyArray
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.vocabulary import vocabulary

_SPACE = "▁"
_LONGEST = 6  # bytes of "<0x0A>"; a character has 4 at most
# llama_token_type of the tokens that are matched before all others.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


@dataclass(frozen=True)
class SpmCoverage:
    """The characters that a vocabulary covers.

    Attributes:
        words: tokens that are one character.
        missing: bytes without a token.
        markers: tokens that are matched as a whole.
        controls: those of them that are matched only where control tokens are parsed.
        spaced: a space is prepended to the rest.
    """

    words: frozenset[bytes]
    missing: frozenset[int]
    markers: tuple[bytes, ...]
    controls: frozenset[bytes]
    spaced: bool

    def unknown(self, text: bytes, *, with_controls: bool = True) -> str:
        """Return a character of `text` that is not covered; "" if there is none."""
        for marker in self.markers:
            if with_controls or marker not in self.controls:
                text = text.replace(marker, b"")
        if text and self.spaced:
            text = b" " + text
        for character in sorted(set(text.decode("utf-8", "replace").replace(" ", _SPACE))):
            encoded = character.encode()
            if encoded not in self.words and not self.missing.isdisjoint(encoded):
                return character
        return ""


def spm_coverage(header: GGUFHeader) -> SpmCoverage | None:
    """Return the coverage of a model's vocabulary; None if it covers everything."""
    found = vocabulary(header)
    if found.kind != "SPM" or found.tokens is None:
        return None
    words = frozenset(word for word in found.tokens.raw_strings() if len(word) <= _LONGEST)
    missing = frozenset(b for b in range(256) if b"<0x%02X>" % b not in words and bytes([b]) not in words)
    if not missing:
        return None
    types = header.metadata.get("tokenizer.ggml.token_type")
    kinds = types if isinstance(types, LazyArray) else ()
    kind_of = {
        word: kind
        for word, kind in zip(found.tokens.raw_strings(), kinds, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and word
    }
    controls = frozenset(word for word, kind in kind_of.items() if kind != _USER_DEFINED)
    spaced = header.metadata.get("tokenizer.ggml.add_space_prefix", True) is not False
    return SpmCoverage(words, missing, tuple(sorted(kind_of, key=len, reverse=True)), controls, spaced)
