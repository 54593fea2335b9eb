"""Drafting of one run: as the settings say, always, or off."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from cpuchat.protocol.drafters import CHOICES
from cpuchat.protocol.messages import Speculation

DraftingMode = Literal["auto", "always", "off"]
ALWAYS_DEPTH: Final = 4
"""Tokens drafted per pass where drafting is not left to the depth controller."""


def in_mode(mode: DraftingMode, chosen: Speculation) -> Speculation:
    """Return how to draft: `chosen`, nothing, or always the same number of tokens, so that every pass shows what the
    drafters do, also where that is slower.
    """
    if mode == "auto":
        return chosen
    if mode == "off":
        return Speculation()
    drafters, depth = chosen.drafters or CHOICES["auto"], chosen.depth or ALWAYS_DEPTH
    return msgspec.structs.replace(chosen, drafters=drafters, depth=depth, min_probability=0.0)
