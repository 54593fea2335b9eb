"""One kept state: what the memory held after some tokens."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from cpuchat.engine.states.token_history import TokenHistory
from cpuchat.prefix import common_prefix

TOKEN_BYTES = 4


def token_bytes(tokens: Tokens[int]) -> bytes:
    """Return tokens as int32, which compare fast."""
    return np.asarray(tokens, np.int32).tobytes()


def shared_tokens(one: bytes, other: bytes) -> int:
    """Return the tokens that two texts (of `token_bytes`) have in common at their beginning."""
    return common_prefix(one, other) // TOKEN_BYTES


class Part(msgspec.Struct, frozen=True):
    """A state in a file: after the first `n` of the file's tokens; `nbytes` from `at` on."""

    n: int
    at: int
    nbytes: int
    crc32: int
    is_whole: bool
    first: int = 0


@dataclass(eq=False)
class State:
    """What the memory held after `tokens` (of `token_bytes`).

    Attributes:
        owner, stem: whose it is, and the conversation that it is saved as.
        is_whole: everything; else only what cannot be cut (`Sequence.state`), for a memory that holds the tokens.
        data: None while it is only on disk (`file`, `part`), and where nothing is needed but cutting.
        first: the first position of `tokens` that every layer has in it.
        row: the logits after the last token, for a prompt that ends exactly here.
        history: the text with its tokens, of a whole state.
        draft: the draft model's state, of a whole state.
        used: number of the request that used it last.
    """

    owner: str
    stem: str
    tokens: bytes
    is_whole: bool
    data: np.ndarray | None = None
    first: int = 0
    row: np.ndarray | None = None
    history: TokenHistory | None = None
    draft: State | None = None
    used: int = 0
    file: Path | None = None
    part: Part | None = None

    def __len__(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def restored_bytes(self) -> int:
        """Return the bytes that restoring it copies."""
        own = self.data.nbytes if self.data is not None else self.part.nbytes if self.part is not None else 0
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
        """Return the tokens."""
        return np.frombuffer(self.tokens, np.int32).tolist()
