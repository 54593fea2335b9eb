"""Messages between the app and the measuring process (`engine.lockstep`): lines of JSON.

The process ends with its input, so that it never outlives its parent.
"""

from __future__ import annotations

import msgspec

from cpuchat.protocol import Message


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A text of one kind: `content`, or `dialogues`, which the base model's chat template turns into text."""

    kind: str
    content: str = ""
    dialogues: tuple[tuple[Message, ...], ...] = ()


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Compare each of `others` with `base` on `cpus`, over `texts` in windows of `n_ctx` tokens.

    `done` has, for each of `others`, the windows that need not be measured again.
    """

    base: str
    others: tuple[str, ...]
    cpus: tuple[int, ...]
    texts: tuple[Text, ...]
    n_ctx: int
    done: tuple[tuple[int, ...], ...] = ()


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """The model `name` is being loaded; `share` (0-1) of it is."""

    name: str
    share: float


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag="planned"):
    """`kinds` of the windows, in the order in which they are measured. `note`: "" or how memory is made to do."""

    kinds: tuple[str, ...]
    note: str = ""


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """A position where the most probable tokens differ: the text before it, the token that follows in the text, and
    both models' choices with their probabilities (0-1)."""

    kld: float
    context: str
    token: str
    base_top: str
    base_p: float
    other_top: str
    other_p: float


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """One window of one of the others. The arrays of `statistics.Scores` are float32, little-endian; `worst` are the
    disagreements with the highest KLD, the highest first."""

    other: int
    window: int
    kld: bytes
    base_nll: bytes
    other_nll: bytes
    same_top: bytes
    worst: tuple[Disagreement, ...]


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """All windows are measured."""


Answer = Loading | Planned | Scored | Finished
