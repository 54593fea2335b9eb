"""Finding out how a context with a recurrent state rolls back, by doing it."""

from __future__ import annotations

from typing import Final

import numpy as np

from cpuchat.engine.llama.bindings import llama
from cpuchat.engine.llama.rollback import CHECKPOINT, Bounded, Checkpoint, NoRollback, Rollback
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.errors import GenerationFailed
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

_PROBE: Final = (100, 200, 300, 400)
"""Different tokens that every real vocabulary makes use of."""


def detect_rollback(sequence: Sequence) -> Rollback:
    """Return how this context rolls back. The sequence is emptied.

    Costs 4 small passes, 8 when the first way turns out not to work. Needs a context with 3 rows of logits.

    Raises:
        Aborted: as `Sequence.extend`.
    """
    context, memory = sequence.context, llama.llama_get_memory(sequence.context)
    if sequence.n_batch <= len(_PROBE):
        return NoRollback(memory)  # such batches are of no use for drafts anyway
    room = min(MAX_DEPTH, sequence.n_batch - 1)
    snapshots = min(int(llama.llama_n_rs_seq(context)), room)
    ways: list[Rollback] = [Bounded(memory, snapshots) if snapshots else Rollback(memory, room)]
    if int(llama.llama_n_seq_max(context)) > CHECKPOINT:
        ways.append(Checkpoint(memory, room))
    return next((way for way in ways if can_roll_back(sequence, way)), NoRollback(memory))


def can_roll_back(sequence: Sequence, way: Rollback) -> bool:
    """Reject two of three tokens, go on with the first of them, and see whether the logits know of the rejected ones.

    They may differ from those of a text without them by rounding, because passes of other lengths gave them. So what
    counts is that they are nearer to those than to the ones of a text in which nothing was rolled back.
    """
    first, kept, *rejected = (token % sequence.n_vocab for token in _PROBE)
    sequence.clear()
    try:
        sequence.extend([first, kept, *rejected, rejected[0]], n_outputs=3)
        right, wrong = sequence.logits(2).copy(), sequence.logits(4).copy()
        sequence.clear()
        sequence.extend([first])
        way.checkpoint()
        sequence.extend([kept, *rejected[: way.max_draft]])
        held = way.roll_back_to(2, 1, 1)
        if held is None:
            return False
        del sequence.tokens[held:]
        if held < 2:
            sequence.extend([kept])
        row = sequence.step(rejected[0])
        return bool(np.linalg.norm(row - right) < 0.5 * np.linalg.norm(wrong - right))
    except GenerationFailed:  # the positions are not what they should be
        return False
    finally:
        sequence.clear()
