"""Which tokens a text was made of, so that a prompt that goes on from it finds its KV again.

A model's answer, rendered into the next prompt and tokenised anew, often gives other tokens than the model wrote
("t", "he" comes back as "the"), and everything behind the first difference would have to be evaluated again. So the
text of the last prompt and answer is remembered together with its tokens and the places where it may be cut: between
the tokens that the model wrote itself. A new prompt takes over tokens up to the last cut in the common text, and only
the rest is tokenised.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

import msgspec

from cpuchat.engine.llama.control_text import MARK_BYTES
from cpuchat.prefix import common_prefix


class TokenHistory(msgspec.Struct):
    """Text and tokens of one conversation so far.

    `cut_bytes` and `cut_tokens` are parallel and ascending: the first `cut_tokens[i]` tokens are exactly the first
    `cut_bytes[i]` bytes of `text`. The empty prefix is always a cut.
    """

    text: bytes = b""
    tokens: list[int] = msgspec.field(default_factory=list)
    cut_bytes: list[int] = msgspec.field(default_factory=lambda: [0])
    cut_tokens: list[int] = msgspec.field(default_factory=lambda: [0])

    def copy(self) -> TokenHistory:
        """One that does not change with this one."""
        return TokenHistory(self.text, list(self.tokens), list(self.cut_bytes), list(self.cut_tokens))

    def check(self) -> None:
        """Raises ValueError when the parts contradict each other (read from a damaged file)."""
        if not (
            len(self.cut_bytes) == len(self.cut_tokens)
            and self.cut_bytes[:1] == [0] == self.cut_tokens[:1]
            and self.cut_bytes == sorted(self.cut_bytes)
            and self.cut_tokens == sorted(self.cut_tokens)
            and self.cut_bytes[-1] <= len(self.text)
            and self.cut_tokens[-1] <= len(self.tokens)
        ):
            raise ValueError("cuts do not match the text")

    def _cut(self, text: bytes) -> int:
        """Index of the last cut inside the common prefix with `text`."""
        return bisect_right(self.cut_bytes, common_prefix(self.text, text)) - 1

    def shared(self, text: bytes) -> int:
        """Bytes of `text` whose tokens are known."""
        return self.cut_bytes[self._cut(text)]

    def encode(
        self, text: bytes, tokenize: Callable[[bytes, bool], list[int]], piece: Callable[[int], bytes]
    ) -> list[int]:
        """Tokens of a whole prompt, taken over as far as they are known.

        Args:
            text: the prompt, with its marks (`control_text`): content never takes over control tokens.
            tokenize: (text, at_start) -> tokens. A rest that tokenizers give a leading space makes the whole prompt
                be tokenised anew.
            piece: the text of one token, control tokens included.
        """
        i = self._cut(text)
        n_bytes, n_tokens = self.cut_bytes[i], self.cut_tokens[i]
        if n_tokens == 0:
            return tokenize(text, True)
        rest = text[n_bytes:]
        if not rest:
            return self.tokens[:n_tokens]
        added = tokenize(rest, False)
        if b"".join(map(piece, added)) != rest.replace(MARK_BYTES, b""):
            return tokenize(text, True)
        return self.tokens[:n_tokens] + added

    def record(self, prompt: bytes, tokens: list[int], answer: Iterable[int], piece: Callable[[int], bytes]) -> None:
        """Remember `prompt` (as given to `encode`) with its `tokens`, and the tokens of the answer to it."""
        i = self._cut(prompt)
        # Cuts of earlier answers stay good only if the prompt was really made from the tokens before them.
        if self.tokens[: self.cut_tokens[i]] != tokens[: self.cut_tokens[i]]:
            i = 0
        self.cut_bytes, self.cut_tokens = self.cut_bytes[: i + 1], self.cut_tokens[: i + 1]
        self.tokens = list(tokens)
        parts = [prompt]
        at_byte, at_token = len(prompt), len(tokens)
        if at_byte > self.cut_bytes[-1]:
            self.cut_bytes.append(at_byte)
            self.cut_tokens.append(at_token)
        for token in answer:
            text = piece(token)
            parts.append(text)
            self.tokens.append(token)
            at_byte += len(text)
            at_token += 1
            self.cut_bytes.append(at_byte)
            self.cut_tokens.append(at_token)
        self.text = b"".join(parts)
