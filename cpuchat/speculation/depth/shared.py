"""How many drafted tokens to verify in a pass over the tokens of several answers."""

from __future__ import annotations

from collections.abc import Sequence

from cpuchat.speculation.depth.constants import CONSTANTS
from cpuchat.speculation.drafters.drafter import MAX_DEPTH


def shared_depth(
    drafts: Sequence[Sequence[float]], pass_ms: Sequence[float], n_lanes: int, max_depth: int, max_rows: int
) -> int:
    """Return how far to verify the drafts of several answers in one pass: the depth with the most tokens per
    millisecond; 0 where none is worth it. The lanes of a pass are evaluated in step: to depth k it is over 1 + k tokens
    of each, so a draft has to pay for the lanes without one, too.

    `drafts`: for each answer, the chances that its drafted tokens are accepted with all before them; () = no draft.
    `pass_ms`: calibrated ms of passes over 1, 2, ... tokens; longer ones are in proportion. () = not calibrated.
    `n_lanes`: with idle ones between. `max_rows` of logits: one for each answer and each drafted token."""
    if not pass_ms:
        return 0

    def rate(tokens: float, depth: int) -> float:
        n = n_lanes * (1 + depth)
        return tokens / (pass_ms[n - 1] if n <= len(pass_ms) else pass_ms[-1] * n / len(pass_ms))

    tokens, n_rows = float(len(drafts)), len(drafts)
    best, best_depth = CONSTANTS.worthwhile_gain * rate(tokens, 0), 0
    for depth in range(1, min(max_depth, MAX_DEPTH) + 1):
        chances = [draft[depth - 1] for draft in drafts if len(draft) >= depth]
        n_rows += len(chances)
        if not chances or n_rows > max_rows:
            break
        tokens += sum(chances)
        if (now := rate(tokens, depth)) > best:
            best, best_depth = now, depth
    return best_depth
