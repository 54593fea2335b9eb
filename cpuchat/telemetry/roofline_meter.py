"""Follows an answer for the roofline: its evaluations in the last second, and the counters' samples meanwhile."""

from __future__ import annotations

from collections import deque

from cpuchat.model_info import ModelInfo
from cpuchat.telemetry.machine import Bandwidth, MachineSample, Power
from cpuchat.telemetry.roofline import LEAST_PREFILL, Decoding, Evaluated, Reach, Roofline, evaluated, roofline
from cpuchat.timings import SpeculationFigures, Timings

_UPDATES = 5  # the worker tells four times a second what it evaluated


class _Average:
    """Averages the samples taken while decoding."""

    def __init__(self) -> None:
        self._n = 0
        self._bandwidth: list[Bandwidth] = []
        self._power: list[Power] = []
        self._first: tuple[float, int] | None = None  # (joules, tokens written)
        self._last: tuple[float, int] = (0.0, 0)

    def add(self, sample: MachineSample, predicted_n: int) -> None:
        if sample.bandwidth is not None:
            self._bandwidth.append(sample.bandwidth)
        if sample.power is not None:
            self._power.append(sample.power)
            self._last = (sample.power.joules, predicted_n)
            if self._first is None:
                self._first = self._last

    @property
    def joules_per_token(self) -> float | None:
        if self._first is None:
            return None
        tokens = self._last[1] - self._first[1]
        return (self._last[0] - self._first[0]) / tokens if tokens > 0 else None

    def sample(self, last: MachineSample) -> MachineSample:
        """Return the means, with the reasons of the `last` sample for missing figures; power is the current one if it
        was never sampled.
        """
        return MachineSample(
            bandwidth=_mean_bandwidth(self._bandwidth),
            power=_mean_power(self._power) or last.power,
            no_bandwidth=last.no_bandwidth,
            no_power=last.no_power,
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _mean_bandwidth(samples: list[Bandwidth]) -> Bandwidth | None:
    """Return the mean over the samples of the newest source."""
    if not samples:
        return None
    newest = samples[-1]
    same = [one for one in samples if (one.source, len(one.per_l3)) == (newest.source, len(newest.per_l3))]
    reads = [one.read for one in same if one.read is not None]
    writes = [one.write for one in same if one.write is not None]
    return Bandwidth(
        total=_mean([one.total for one in same]),
        source=newest.source,
        scope=newest.scope,
        read=_mean(reads) if newest.read is not None else None,
        write=_mean(writes) if newest.write is not None else None,
        per_l3=tuple(_mean(list(values)) for values in zip(*(one.per_l3 for one in same), strict=True)),
    )


def _mean_power(samples: list[Power]) -> Power | None:
    if not samples:
        return None
    newest = samples[-1]
    return Power(_mean([one.watts for one in samples]), newest.joules, newest.source)


class RooflineMeter:
    """Keeps the inputs of `roofline` beside the meter's rates."""

    def __init__(self) -> None:
        self._model: ModelInfo | None = None
        self._reach = Reach()
        self._prefill: float | None = None  # best rate since the model was loaded
        self._machine: MachineSample | None = None
        self.reset()

    def reset(self) -> None:
        """Begin another answer."""
        self._figures: SpeculationFigures | None = None
        self._told: deque[Evaluated] = deque([Evaluated()], maxlen=_UPDATES)
        self._whole: Evaluated | None = None
        self._n_past: int | None = None
        self._average = _Average()

    def model(self, model: ModelInfo | None) -> None:
        """Set the loaded model, or None."""
        self._model, self._prefill, self._reach = model, None, Reach()
        self.reset()

    def predicted(self, reach: Reach) -> None:
        """Set what the cores of the loaded model reach by the cost model."""
        self._reach = reach

    @property
    def prefill_tok_s(self) -> float:
        """Return the best measured speed of a prompt, else the predicted one; 0: not known."""
        return self._prefill or self._reach.compute_tok_s

    def prefilled(self, n_tokens: int, tok_s: float | None) -> None:
        """Record that `n_tokens` of a prompt were evaluated at `tok_s`."""
        if tok_s is not None and n_tokens >= LEAST_PREFILL:
            self._prefill = max(tok_s, self._prefill or 0.0)

    def update(self, figures: SpeculationFigures, predicted_n: int) -> None:
        """Record figures taken when `predicted_n` tokens were generated."""
        self._figures = figures
        if figures.passes:
            self._told.append(Evaluated(max(predicted_n - 1, 0), figures.passes, figures.draft_passes, figures.draft_n))

    def machine(self, sample: MachineSample, predicted_n: int, decoding: bool) -> None:
        """Record a sample of the counters."""
        self._machine = sample
        if decoding:
            self._average.add(sample, predicted_n)

    def finish(self, timings: Timings) -> None:
        """End the answer: from now on its averages count."""
        self.prefilled(timings.prompt_n, timings.prompt_per_second)
        self._figures = timings.speculation
        self._whole = evaluated(timings)
        self._n_past = max(0, timings.n_past - timings.predicted_n // 2)

    def roofline(
        self, live: float | None, average: float | None, predicted_n: int, n_past: int, depth: int
    ) -> Roofline:
        """Return the current figures. `live` is None when no answer is running; `depth` is the user's, 0 = adaptive."""
        whole, figures = self._whole, self._figures
        machine = self._machine
        if whole is None:
            whole, recent = self._so_far(predicted_n)
        else:
            recent, live = whole, average
            n_past = n_past if self._n_past is None else self._n_past
            machine = None if machine is None else self._average.sample(machine)
        now = Decoding(
            tok_s=live,
            average_tok_s=average,
            recent=recent,
            whole=whole,
            n_past=n_past,
            by_position=figures.by_position if figures is not None else (),
            fixed_depth=depth,
            draft_ms=figures.draft_ms if figures is not None else 0.0,
            plain_tok_s=1e3 / figures.plain_ms if figures is not None and figures.plain_ms else None,
        )
        return roofline(self._model, now, self._prefill, machine, self._average.joules_per_token, self._reach)

    def _so_far(self, predicted_n: int) -> tuple[Evaluated, Evaluated]:
        """Return (the whole answer, about its last second)."""
        newest = self._told[-1]
        if not newest.passes:  # nothing is drafted
            tokens = max(predicted_n - 1, 0)
            plain = Evaluated(tokens, tokens)
            return plain, plain
        recent = newest.since(self._told[0])
        return newest, recent if recent.passes > 0 and recent.tokens > 0 else newest
