"""Samples the next token from one row of logits.

The order and meaning of the filters are llama.cpp's default chain (src/llama-sampler.cpp, common/common.h):
penalties, top-k, top-p, min-p, temperature, draw. The C samplers build an array of 12-byte structs for the whole
vocabulary on every call; here nothing is sorted before the row has been cut to a short list, which is exact.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cpuchat.base.errors import GenerationFailed, GrammarUnmet, UsageError
from cpuchat.protocol.messages import Sampling

Row = NDArray[np.float32]
Ids = NDArray[np.intp]
Candidates = tuple[Sequence[int] | Ids, list[float] | NDArray[np.floating]]
"""Token ids and their weights, descending unless every filter is off."""

_MAX_STACK = 128
_LONGEST_SHORTLIST = 256  # above it numpy is faster
_MIN_TEMPERATURE = 1e-8  # below this, (logit - max) / temperature could overflow; the result is greedy anyway
_BLOCK = 128
_FEW = 16  # entries near the peak, beyond which numpy reads them faster
_LARGEST_PEAK = 1e4  # above it a float32 is off by more than 0.001
_N_UNIFORMS = 64


def largest(row: Row, k: int) -> Ids:
    """Return the ids of the `k` largest entries, descending, equal ones by lower id. Exact; no NaN allowed.

    The row is folded into `rows` x `width` and the maximum of each column is taken. The k-th largest of those maxima is
    at most the k-th largest entry (k different entries reach it), so all the winners are in the columns whose maximum
    reaches it: two cheap passes instead of a partition of the whole vocabulary."""
    n = row.size
    rows = min(_MAX_STACK, n // (4 * k))
    if k >= n:
        ids = np.arange(n)
    elif rows < 4:
        ids = np.flatnonzero(row >= np.partition(row, n - k)[n - k])
    else:
        width = n // rows
        body = row[: rows * width].reshape(rows, width)
        tops = body.max(axis=0)
        floor = np.partition(tops, width - k)[width - k]
        columns = np.flatnonzero(tops >= floor)
        place = np.flatnonzero(body[:, columns] >= floor)
        ids = place // columns.size * width + columns[place % columns.size]
        tail = rows * width + np.flatnonzero(row[rows * width :] >= floor)
        if tail.size:
            ids = np.concatenate((ids, tail))
    # ids are ascending here, so a stable sort leaves equal logits in order of id
    return ids[np.argsort(-row[ids], kind="stable")[:k]]


class _Shortlist:
    """Finds those of the `k` largest entries that matter, in one row after the other: as a rule, those within a margin
    of the peak. Where others might matter (`Sampler._cut`), the row is searched for all `k`, and the margin widened.
    The rest uses Python numbers: after a decode the caches hold none of numpy's code, and calling another of its
    functions costs more than the few numbers that it works on."""

    def __init__(self, k: int, n_vocab: int) -> None:
        self.k = k
        self._margin = 8.0
        self._mask = np.empty(n_vocab, np.bool_)

    def near(self, row: Row, peak: float) -> tuple[list[int], list[float], float] | None:
        """Return ids and logits of the entries near the peak, descending, equal logits by lower id, and the logit that
        no other entry reaches. None: they are too many."""
        limit = peak - self._margin
        np.greater_equal(row, limit, out=self._mask)
        found = self._mask.nonzero()[0]
        n = found.size
        if n > 4 * self.k or abs(peak) > _LARGEST_PEAK:
            return None
        if n > _FEW:
            self._margin *= 0.99
        ids = found.tolist()
        logits = row[found].tolist() if n > _FEW else [row.item(token) for token in ids]
        # ids ascend, and a stable sort keeps equal logits in that order, backwards too
        order = sorted(range(n), key=logits.__getitem__, reverse=True)[: self.k]
        # numpy has compared with the limit as a float32
        return [ids[i] for i in order], [logits[i] for i in order], limit + 0.001

    def all(self, row: Row, peak: float) -> tuple[list[int], list[float], float]:
        """Like `near`, for all `k` largest entries."""
        k = self.k
        ids = largest(row, min(2 * k, row.size))
        logits = row[ids].tolist()
        self._margin = max(min(1.3 * self._margin, peak - logits[(3 * k) // 2]), 1.0)
        return ids[:k].tolist(), logits[:k], -math.inf


class _Window:
    """Counts of the last `size` tokens, in arrays so that nothing is rebuilt per token."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tokens: deque[int] = deque()
        self._slot: dict[int, int] = {}
        self._ids, self._counts = array("q"), array("f")

    def add(self, token: int) -> None:
        ids, counts = self._ids, self._counts
        slot = self._slot.setdefault(token, len(ids))
        if slot == len(ids):
            ids.append(token)
            counts.append(0)
        counts[slot] += 1
        self._tokens.append(token)
        if len(self._tokens) > self._size:
            slot = self._slot[self._tokens[0]]
            counts[slot] -= 1
            if not counts[slot]:  # the last one moves to its place
                self._slot[ids[-1]] = slot
                ids[slot], counts[slot] = ids[-1], counts[-1]
                del ids[-1], counts[-1], self._slot[self._tokens[0]]
            self._tokens.popleft()

    def counts(self) -> tuple[Ids, Row]:
        """Return the different tokens, and how often each is there."""
        return np.array(self._ids), np.array(self._counts)


Mask = Callable[[Row], NDArray[np.bool_]]
"""Returns which tokens may come next."""


class Constraint(ABC):
    """What an answer may be, beside its probability. Nothing is rolled back: drafted tokens are checked one by one."""

    @abstractmethod
    def accept(self, token: int) -> None:
        """Add the next token of the answer, which is allowed."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether everything is allowed from now on."""

    def forced(self, token: int | None = None) -> int | None:
        """Return the token that comes next whatever is sampled, or in place of `token`, which was; None: any may."""
        return None

    def allows(self, token: int) -> bool:
        """Return whether `token` may come next."""
        return True

    def mask(self, row: Row) -> NDArray[np.bool_]:
        """Return which tokens may come next, or of the most likely in `row` those that may."""
        return np.ones(row.size, np.bool_)


class Sampler:
    """Samples tokens for one answer; the same seed, settings and rows give the same tokens.

    A sampled token that a constraint rejects is sampled again from those that all of them allow, as in llama.cpp
    (common/sampling.cpp). Without constraints `sample` uses one uniform number (none when greedy), and changes nothing
    else. `banned` tokens are never chosen; the `constraints` are asked in their order. `seed`: the one in use, drawn
    (32 bits) when `sampling` has none. Raises UsageError: a value of `sampling` is out of range."""

    def __init__(
        self, sampling: Sampling, n_vocab: int, banned: Sequence[int] = (), constraints: Sequence[Constraint] = ()
    ) -> None:
        _check(sampling)
        self._constraints = list(constraints)
        self._banned = np.array(banned, np.intp) if banned else None
        self._sampling = sampling
        self._greedy = sampling.temperature <= 0
        self._temperature = max(sampling.temperature, _MIN_TEMPERATURE)
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._random = np.random.Generator(np.random.PCG64(self.seed)).random
        self._uniforms: list[float] = []  # drawn in advance: the same numbers, for fewer calls of numpy
        neutral = sampling.repeat_penalty == 1 and not sampling.presence_penalty and not sampling.frequency_penalty
        self._window = None if neutral or not sampling.repeat_last_n else _Window(sampling.repeat_last_n)
        short = 0 < sampling.top_k <= min(_LONGEST_SHORTLIST, n_vocab // 4)
        self._shortlist = _Shortlist(sampling.top_k, n_vocab) if short else None
        self._min_p_logit = math.log(min(sampling.min_p, 1.0)) if sampling.min_p > 0 else -math.inf

    def accept(self, token: int) -> None:
        """Add `token` to what penalties and constraints apply to. Raises GrammarUnmet: a constraint cannot go on."""
        if self._window is not None:
            self._window.add(token)
        if self._constraints:
            for one in self._constraints:
                one.accept(token)
            self._constraints = [one for one in self._constraints if not one.is_over]

    def accept_prompt(self, tokens: Iterable[int]) -> None:
        """Let penalties apply to the last `repeat_last_n` tokens of the prompt (llama-server counts them too)."""
        if self._window is not None:
            for token in deque(tokens, maxlen=self._sampling.repeat_last_n):
                self._window.add(token)

    def sample(self, row: Row) -> int:
        """Return the next token. `row`: logits, float32 of shape (n_vocab,), which may be a view of the engine's
        memory: only the logits of banned tokens change, to -inf. Raises GenerationFailed: the row holds NaN or infinity
        where the winner is; GrammarUnmet: no token of the vocabulary is allowed."""
        if not self._constraints:
            return self._sample(row)
        for one in self._constraints:
            if (forced := one.forced()) is not None:
                return forced
        token = self._sample(row)
        for one in self._constraints:
            if (forced := one.forced(token)) is not None:
                return forced
        if all(one.allows(token) for one in self._constraints):
            return token
        return self._sample(row, lambda row: np.logical_and.reduce([one.mask(row) for one in self._constraints]))

    def _sample(self, row: Row, mask: Mask | None = None) -> int:
        ids, weights = self.candidates(row, mask)
        if self._greedy:
            return ids[0]
        draw = _draw_short if isinstance(weights, list) else _draw
        if not self._uniforms:
            self._uniforms = self._random(_N_UNIFORMS)[::-1].tolist()
        return int(ids[draw(weights, self._uniforms.pop())])  # type: ignore[arg-type]

    def candidates(self, row: Row, mask: Mask | None = None) -> Candidates:
        """Return the tokens that `sample` chooses from, and their weights exp((logit - max) / temperature): only those
        of `mask`, if that is given. Raises as `sample`."""
        if self._banned is not None:
            row = row if row.flags.writeable else row.copy()
            row[self._banned] = -np.inf
        if self._window is None:
            return self._filtered(row, mask)
        row = row if row.flags.writeable else row.copy()
        s, penalty = self._sampling, np.float32(self._sampling.repeat_penalty)
        ids, counts = self._window.counts()
        before = row[ids]
        # Dividing alone would make a token with a negative logit more likely.
        logits = np.where(before <= 0, before * penalty, before / penalty)
        less = counts * np.float32(s.frequency_penalty) + np.float32(s.presence_penalty)
        row[ids] = (logits - less).astype(np.float32, copy=False)
        try:
            return self._filtered(row, mask)
        finally:
            row[ids] = before

    def _filtered(self, row: Row, mask: Mask | None) -> Candidates:
        if mask is not None:
            row = np.where(mask(row), row, np.float32(-np.inf))
            if np.isneginf(row.max()):
                raise GrammarUnmet(
                    "No token of this model's vocabulary can continue the answer under the grammar.",
                    "Allow other characters, or choose another model.",
                )
        token = int(row.argmax())  # NaN counts as the largest, so it cannot hide
        peak = row.item(token)
        if not math.isfinite(peak):
            raise GenerationFailed(
                "The model produced NaN or infinite logits.",
                "The file may be damaged, or the KV cache type unsuitable: set it to f16, or download the model again.",
            )
        if self._greedy:
            return [token], [1.0]
        if self._shortlist is None:
            return self._filter_long(row, np.float32(peak))
        near = self._shortlist.near(row, peak)
        found = near and self._cut(*near, peak)
        if found is None:
            found = self._cut(*self._shortlist.all(row, peak), peak)
            assert found is not None
        return found

    def _cut(
        self, ids: list[int], logits: list[float], limit: float, peak: float
    ) -> tuple[list[int], list[float]] | None:
        """Apply top-p, min-p and temperature to the largest entries, in Python numbers. None when others of the top-k,
        which are all below `limit`, could change the result."""
        s, exp = self._sampling, math.exp
        n = keep = len(ids)
        others = max(s.top_k - n, 0) * exp(limit - peak)  # their share of the peak's weight, at most
        min_logit = peak + self._min_p_logit
        while keep > 1 and logits[keep - 1] < min_logit:
            keep -= 1
        has_all = not others or min_logit >= limit  # that pass min-p
        if s.top_p < 1:
            shares = [exp(x - peak) for x in logits]
            total = sum(shares)
            target, reached, cut = s.top_p * total, 0.0, 0
            for share in shares:
                cut += 1
                reached += share
                if reached >= target:
                    break
            if reached < s.top_p * (total + others) and not (has_all and cut >= keep):
                return None
            keep = min(keep, cut)
        elif not has_all:
            return None
        temperature = self._temperature
        return ids[:keep], [exp((x - peak) / temperature) for x in logits[:keep]]

    def _filter_long(self, row: Row, peak: np.float32) -> Candidates:
        """Apply the same filters to any number of tokens, in numpy."""
        s = self._sampling
        floor = None if self._min_p_logit == -math.inf else peak + np.float32(self._min_p_logit)
        if not s.top_k and s.top_p >= 1 and floor is None:
            with np.errstate(over="ignore"):
                return range(row.size), np.exp((row - peak) / np.float32(self._temperature))
        if s.top_k:
            ids = largest(row, min(s.top_k, row.size))
            if s.top_p < 1:
                ids = ids[: _top_p(row[ids], peak, s.top_p, None)]
            if floor is not None:
                ids = ids[: max(1, int(np.count_nonzero(row[ids] >= floor)))]
        elif floor is not None:
            # Both cuts keep the most likely ones, so min-p may come first; the top-p sum is still the whole row's.
            ids = np.flatnonzero(row >= floor)
            ids = ids[np.argsort(-row[ids], kind="stable")]
            if s.top_p < 1:
                ids = ids[: _top_p(row[ids], peak, s.top_p, float(np.exp(row - peak).sum()))]
        else:
            total, k = float(np.exp(row - peak).sum()), 64
            ids = largest(row, min(k, row.size))
            while (keep := _top_p(row[ids], peak, s.top_p, total)) == ids.size < row.size:
                k *= 8
                ids = largest(row, min(k, row.size))
            ids = ids[:keep]
        return ids, np.exp((row[ids].astype(np.float64) - float(peak)) / self._temperature)


def _top_p(logits: Row, peak: np.float32, top_p: float, total: float | None) -> int:
    """Return how many of `logits` (descending), at least one, reach the share `top_p` of `total` (None: theirs)."""
    cumulative = np.exp(logits.astype(np.float64) - float(peak)).cumsum()
    target = top_p * (cumulative[-1] if total is None else total)
    return min(int(cumulative.searchsorted(target)) + 1, cumulative.size)


def _draw(weights: NDArray[np.floating], point: float) -> int:
    """Return the index whose share of the weights holds `point` in [0, 1); of many, first a block by its sum."""
    if weights.size <= 2 * _BLOCK:
        return _place(weights.astype(np.float64).cumsum(), point)
    sums = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK)).cumsum(dtype=np.float64)
    block = _place(sums, point)
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].astype(np.float64).cumsum()
    before = sums[block - 1] if block else 0.0
    return block * _BLOCK + _place(inside, (point * sums[-1] - before) / inside[-1])


def _place(cumulative: NDArray[np.float64], point: float) -> int:
    """Return the index whose share of `cumulative` (running sums) holds `point`; never one of weight zero."""
    total = cumulative[-1]
    at = int(cumulative.searchsorted(max(point, 0.0) * total, side="right"))
    # rounding can push the last draw to the very end
    return at if at < cumulative.size else int(cumulative.searchsorted(total))


def _draw_short(weights: list[float], point: float) -> int:
    """Draw as `_draw`, in Python numbers, from descending weights."""
    aim, reached = point * sum(weights), 0.0
    for at, weight in enumerate(weights):
        reached += weight
        if reached > aim:
            return at
    return 0  # rounding pushed the last draw to the very end; the first weight is never zero


def _check(s: Sampling) -> None:
    for name in ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(s, name)):
            raise UsageError(f"{name} is {getattr(s, name)}.", "Use a finite number.")
    for name in ("temperature", "top_k", "top_p", "min_p", "repeat_last_n"):
        if getattr(s, name) < 0:
            raise UsageError(f"{name} is {getattr(s, name)}.", "Use 0 or more.")
    if s.repeat_penalty < 0.01:  # divides a logit, which must stay finite
        raise UsageError(f"repeat_penalty is {s.repeat_penalty}.", "Use 0.01 or more; 1 turns it off.")
    if s.seed is not None and s.seed < 0:
        raise UsageError(f"seed is {s.seed}.", "Use 0 or more, or leave it out for a random seed.")
