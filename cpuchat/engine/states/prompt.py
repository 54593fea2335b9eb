"""What the store of states compares: a prompt, the tokens of a conversation so far, and one kept state.

A model's answer, tokenized again with the next prompt, often gives other tokens than the model generated ("t", "he"
comes back as "the"), and everything after the first difference would have to be re-evaluated. So the text of the last
prompt and answer is kept with its tokens and the places between those that the model generated, where it may be cut
(`TokenHistory`). A new prompt reuses tokens up to the last cut in the common text; only the rest is tokenized.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np

from cpuchat.base.text import common_prefix
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.llama.vocab import MARK_BYTES
from cpuchat.engine.text.reasoning import FORMATS
from cpuchat.protocol.messages import Message, StateKey

SPACING: Final = 512
"""Tokens between two checkpoints of a long prompt, at least; the last user's message always has one."""
_LINE: Final = 64
"""Tokens of a line that is looked through for its beginning."""
_MARKUP: Final = 1 << 16
"""Bytes between the contents of two messages, at most."""

Change = Literal["", "system", "trimmed", "message", "template"]


@dataclass(frozen=True)
class RenderedPrompt:
    """A rendered prompt: its `text`, with the marks of content (`vocab.MARK`), and the `messages` in it, () for a text
    without messages. `is_trimmed`: the oldest ones were left out."""

    text: bytes
    tokens: list[int]
    messages: tuple[Message, ...] = ()
    is_trimmed: bool = False

    def _contents(self, text: bytes) -> list[tuple[int, int]]:
        """Return the first byte of the content of each message in `text` (without marks) and the one after the last; a
        content that the template has changed is an empty one where the one before ends."""
        found, at, changed = [], 0, 0
        for message in self.messages:
            content = message.content.encode("utf-8", "replace").replace(MARK_BYTES, b"").strip()
            # Looking through all that follows would take seconds for a long chat whose messages the template changes.
            end = at + len(content) + changed + _MARKUP if at else len(text)
            start = text.find(content, at, end)
            found.append((start, start + len(content)) if start >= 0 else (at, at))
            changed = 0 if start >= 0 else changed + 2 * (len(content) + len(message.reasoning))
            at = found[-1][1]
        return found

    def checkpoints(self, start: int, piece: Callable[[int], bytes]) -> list[int]:
        """Return after how many tokens, more than `start`, later prompts are likely to differ: at the content of users'
        messages, which may be edited, and before the marker of reasoning that the template opens, since a later prompt
        often has the answer without it. `piece`: returns the text of one token, control tokens included."""
        text = self.text.replace(MARK_BYTES, b"")
        contents = self._contents(text)
        opening = text[contents[-1][1] :] if contents else b""
        marks = [opening.find(mark.encode()) for kind in FORMATS for mark in (*kind.openings, *kind.closings)]
        markers = [len(text) - len(opening) + at for at in marks if at >= 0]
        wanted = [at for message, (at, _) in zip(self.messages, contents, strict=True) if message.role == "user"]
        last, end = wanted[-1] if wanted else -1, len(text)
        found: list[tuple[int, int]] = []
        wanted = sorted({*wanted, *sorted(markers)[:1]})
        at = len(self.tokens)
        while at > start and wanted:  # from the end: the text of the tokens before `start` is not needed
            while wanted and wanted[-1] >= end:
                found.append((at, wanted.pop()))
            at -= 1
            end -= len(piece(self.tokens[at]))
        places, spaced = list[int](), start
        for token, byte in reversed(found):
            if token > start and (byte >= last or token - spaced >= SPACING):
                places.append(token)
                spaced = token
        return sorted(set(places))

    def head(self, piece: Callable[[int], bytes]) -> int:
        """Return how many tokens come before the content of the first message that is not the system's."""
        contents = self._contents(self.text.replace(MARK_BYTES, b""))
        end = next((at for one, (at, _) in zip(self.messages, contents, strict=True) if one.role != "system"), 0)
        ends = accumulate(len(piece(token)) for token in self.tokens)
        return next((n for n, after in enumerate(ends) if after > end), len(self.tokens))

    def line_start(self, n: int, piece: Callable[[int], bytes]) -> int:
        """Return after how many of the first `n` tokens the line begins that they end in, `n` if it is a long one."""
        before = range(n, max(n - _LINE, 0), -1)
        return next((at for at in before if piece(self.tokens[at - 1]).endswith(b"\n")), n)

    def changed(self, before: bytes) -> tuple[Change, int]:
        """Return what differs first from the text that was evaluated before, and in which message; see `Reuse`."""
        text, old = self.text.replace(MARK_BYTES, b""), before.replace(MARK_BYTES, b"")
        at = common_prefix(text, old)
        if at == min(len(text), len(old)):
            return "", 0
        contents = self._contents(text)
        number = 0
        for message, (start, end) in zip(self.messages, contents, strict=True):
            number += message.role != "system"
            if at < end:
                if message.role == "system":
                    return "system", 0
                if self.is_trimmed and number == 1:
                    return "trimmed", 0
                return ("message" if at >= start else "template"), number
        return ("template", number) if contents else ("", 0)


class TokenHistory(msgspec.Struct):
    """Text and tokens of one conversation. `cut_bytes` and `cut_tokens` are parallel and ascending: the first
    `cut_tokens[i]` tokens are exactly the first `cut_bytes[i]` bytes of `text`. The empty prefix is always a cut."""

    text: bytes = b""
    tokens: list[int] = msgspec.field(default_factory=list)
    cut_bytes: list[int] = msgspec.field(default_factory=lambda: [0])
    cut_tokens: list[int] = msgspec.field(default_factory=lambda: [0])

    def copy(self) -> TokenHistory:
        return TokenHistory(self.text, list(self.tokens), list(self.cut_bytes), list(self.cut_tokens))

    def _cut(self, text: bytes) -> int:
        """Return the index of the last cut inside the common prefix with `text`."""
        return bisect_right(self.cut_bytes, common_prefix(self.text, text)) - 1

    def text_of(self, n: int, piece: Callable[[int], bytes]) -> bytes:
        """Return the text of the first `n` tokens, without marks."""
        text = self.text.replace(MARK_BYTES, b"")
        return text[: max(0, len(text) - sum(len(piece(token)) for token in self.tokens[n:]))]

    def shared(self, text: bytes) -> int:
        """Return how many bytes of `text` have known tokens."""
        return self.cut_bytes[self._cut(text)]

    def encode(
        self, text: bytes, tokenize: Callable[[bytes, bool], list[int]], piece: Callable[[int], bytes]
    ) -> list[int]:
        """Return the tokens of a whole prompt with its marks, reused as far as they are known: content never reuses
        control tokens. `tokenize`: (text, at_start) -> tokens; if it adds a leading space to the rest, the whole prompt
        is tokenized again. `piece`: returns the text of one token, control tokens included."""
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
        self.tokens = [*tokens, *answer]
        parts = [prompt, *map(piece, self.tokens[len(tokens) :])]
        first = 1 if len(prompt) <= self.cut_bytes[-1] else 0  # the end of the prompt is a cut already
        self.cut_bytes += list(accumulate(map(len, parts)))[first:]
        self.cut_tokens += range(len(tokens) + first, len(self.tokens) + 1)
        self.text = b"".join(parts)


TOKEN_BYTES = 4


def token_bytes(tokens: Tokens[int]) -> bytes:
    """Return tokens as int32, which compare fast."""
    return np.asarray(tokens, np.int32).tobytes()


def shared_tokens(one: bytes, other: bytes) -> int:
    """Return the tokens that two texts (of `token_bytes`) have in common at their beginning."""
    return common_prefix(one, other) // TOKEN_BYTES


class StateKind(Enum):
    """What a state holds: all of a conversation; only what cannot be cut (`Sequence.state`), for a KV cache that holds
    its tokens; or all of what several conversations of a client begin with, an agent's system prompt and tools."""

    WHOLE = "whole"
    PARTIAL = "partial"
    HEAD = "head"


class SavedPart(msgspec.Struct, frozen=True):
    """A state in a file: after the first `n` of the file's tokens; `nbytes` from `at` on."""

    n: int
    at: int
    nbytes: int
    crc32: int
    kind: StateKind
    first: int = 0


@dataclass(eq=False)
class State:
    """What the KV cache held after `tokens` (of `token_bytes`). `key`: whose it is, and what it is kept as. `data`:
    None while it is only on disk (`file`, `part`), and where nothing is needed but cutting. `first`: the first position
    that every layer has in it. `row`: the logits after the last token, for a prompt that ends exactly here. A whole
    state has its `history` and the `draft` model's state. `used`: number of the request that used it last. `is_once`:
    no second request has continued it. `lane`: of another answer, which holds it now: copied when it is used."""

    key: StateKey
    tokens: bytes
    kind: StateKind
    data: np.ndarray | None = None
    first: int = 0
    row: np.ndarray | None = None
    history: TokenHistory | None = None
    draft: State | None = None
    used: int = 0
    is_once: bool = False
    file: Path | None = None
    part: SavedPart | None = None
    lane: Sequence | None = None

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def is_whole(self) -> bool:
        return self.kind is not StateKind.PARTIAL

    @property
    def restored_bytes(self) -> int:
        own = self.data.nbytes if self.data is not None else self.part.nbytes if self.part is not None else 0
        own = own if self.lane is None else self.lane.state_size()
        return own + (self.draft.restored_bytes if self.draft is not None else 0)

    @property
    def memory_bytes(self) -> int:
        """Return the memory that dropping it would free."""
        draft = self.draft.memory_bytes if self.draft is not None else 0
        return draft + sum(one.nbytes for one in (self.data, self.row) if one is not None)

    def free(self) -> None:
        """Free the memory: it is on disk."""
        self.data = self.row = None
        if self.draft is not None:
            self.draft.data = None

    def list(self) -> list[int]:
        return np.frombuffer(self.tokens, np.int32).tolist()
