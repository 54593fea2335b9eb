"""Log probabilities of the tokens of an answer, for requests that ask for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from cpuchat.engine.decoding.sampling import Row, Sampler, largest
from cpuchat.protocol.messages import TokenLogprob


class LogprobSampler:
    """Samples as `inner` does, and adds to `found` what the model gave each token, before any option of sampling.

    Args:
        n_top: other tokens that are told with each one, the most likely ones.
        piece: returns the bytes of a token.
        found: gets one entry for each sampled token, in order; also for the one that ends the answer.
    """

    def __init__(self, inner: Sampler, n_top: int, piece: Callable[[int], bytes], found: deque[TokenLogprob]) -> None:
        self.accept = inner.accept
        self._inner = inner
        self._n_top = n_top
        self._piece = piece
        self._found = found

    def sample(self, row: Row) -> int:
        """Return the next token; see `Sampler.sample`."""
        token = self._inner.sample(row)
        peak = float(row.max())
        total = peak + float(np.log(np.exp(row - np.float32(peak)).sum(dtype=np.float64)))
        ids = largest(row, self._n_top).tolist() if self._n_top else []
        top = tuple((self._piece(one), row.item(one) - total) for one in ids)
        self._found.append(TokenLogprob(piece=self._piece(token), logprob=row.item(token) - total, top=top))
        return token
