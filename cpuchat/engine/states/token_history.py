"""The tokens of the chat so far, so that a prompt that continues it hits the KV cache.

A model's answer, rendered into the next prompt and tokenized again, often gives other tokens than the model generated
("t", "he" comes back as "the"), and everything after the first difference would have to be evaluated again. So the
text of the last prompt and answer is kept together with its tokens and the places where it may be cut: between the
tokens that the model generated. A new prompt reuses tokens up to the last cut in the common text, and only the rest is
tokenized.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

import msgspec

from cpuchat.engine.llama.control_text import MARK_BYTES
from cpuchat.prefix import common_prefix


class TokenHistory(msgspec.Struct):
    """Text and tokens of one conversation.

    `cut_bytes` and `cut_tokens` are parallel and ascending: the first `cut_tokens[i]` tokens are exactly the first
    `cut_bytes[i]` bytes of `text`. The empty prefix is always a cut.
    """

    text: bytes = b""
    tokens: list[int] = msgspec.field(default_factory=list)
    cut_bytes: list[int] = msgspec.field(default_factory=lambda: [0])
    cut_tokens: list[int] = msgspec.field(default_factory=lambda: [0])

    def copy(self) -> TokenHistory:
        """Return an independent copy."""
        return TokenHistory(self.text, list(self.tokens), list(self.cut_bytes), list(self.cut_tokens))

    def check(self) -> None:
        """Check the invariants. Raises ValueError when they do not hold, as after a damaged file was read."""
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
        """Return the index of the last cut inside the common prefix with `text`."""
        return bisect_right(self.cut_bytes, common_prefix(self.text, text)) - 1

    def shared(self, text: bytes) -> int:
        """Return how many bytes of `text` have known tokens."""
        return self.cut_bytes[self._cut(text)]

    def encode(
        self, text: bytes, tokenize: Callable[[bytes, bool], list[int]], piece: Callable[[int], bytes]
    ) -> list[int]:
        """Return the tokens of a whole prompt, reused as far as they are known.

        Args:
            text: the prompt, with its marks (`control_text`): content never reuses control tokens.
            tokenize: (text, at_start) -> tokens. If the tokenizer adds a leading space to the rest, the whole prompt is
                tokenized again.
            piece: returns the text of one token, control tokens included.
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
        """Keep `prompt` (as given to `encode`) with its `tokens`, and the tokens of the answer to it."""
        i = self._cut(prompt)
        # Cuts of earlier answers stay valid only if the prompt was made from the tokens before them.
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
