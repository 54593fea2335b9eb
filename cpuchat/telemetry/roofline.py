"""Compares decoding with the limits of the machine: bytes that a pass reads, bandwidth, ceilings, the bottleneck.

Definitions: docs/figures.md. Bandwidths in bytes per second, rates in tokens per second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from cpuchat.costs.model import N_PAST, bytes_read
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import SpeculationFigures, Timings
from cpuchat.telemetry.machine import Bandwidth, MachineSample, Peak, Power
from cpuchat.telemetry.metric import NO_ANSWER, NO_MODEL, Metric, missing

OFF = 1.05
"""Share of the measured peak above which one of the two figures must be wrong."""
OTHER_LOAD, IN_CACHE = 1.3, 0.5
"""Multiples of the model's own traffic above or below which a counter's reading is remarkable."""
AT_THE_LIMIT = 0.75
"""Share of a pass from which on reading memory counts as the limit of decoding."""
PARTLY_CACHED = 4
"""Multiple of the L3 caches up to which a part of the weights may stay in them from pass to pass."""
_FAR_BELOW = 0.5
_ENOUGH = 16  # tokens of an average

NO_LIMIT = "weights fit in L3: no limit"
NO_ESTIMATE = "no estimate for this model"
NO_PEAK = "no peak · run cpuchat probe"
_PARTLY_CACHED = "part of the weights stays in L3"
"""Reasons for a missing figure: of a model in the caches, and of one whose tensors are not known."""
_NO_FIGURE: Metric[Any] = missing(NO_MODEL)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluations in a stretch of decoding: `tokens` generated in `passes` of the target, which verified `draft_n`
    drafted tokens, and `draft_passes` of the draft model."""

    tokens: int = 0
    passes: int = 0
    draft_passes: int = 0
    draft_n: int = 0

    @classmethod
    def of(cls, figures: SpeculationFigures | None, predicted_n: int) -> Evaluated:
        """Return them where `predicted_n` tokens were generated, the first of them from the prompt."""
        tokens = max(predicted_n - 1, 0)
        if figures is None or not figures.passes:  # nothing was to be drafted: each token is a pass
            return cls(tokens, tokens)
        return cls(tokens, figures.passes, figures.draft_passes, figures.draft_n)

    @property
    def tokens_per_pass(self) -> float:
        """Return the tokens generated per pass; 1 before the first pass."""
        return self.tokens / self.passes if self.passes and self.tokens else 1.0

    @property
    def n_per_pass(self) -> float:
        """Return the tokens evaluated per pass; 1 before the first pass."""
        return (self.draft_n + self.passes) / self.passes if self.passes else 1.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """The figures of the roofline.

    `bandwidth` is that of `source`: a counter's name, or "estimated" for `estimate`, which is always what the model
    reads by its header. `counted` is the counter's whole reading. `utilization` is `bandwidth` by `peak`, not cut off
    at 1; `off` says in a few words why it cannot be believed. `remark` is what the counter and the estimate tell
    together. Ceilings in tok/s: without drafts, and at the acceptance of the answer. `peak` is what the answer read, at
    least, where that is more than what was measured. `rough`: it may be more than `peak`. `bytes_per_pass` of the
    target. `limit` is what takes most of a pass. `fits_cache`: the weights stay in L3, so memory is no limit."""

    bandwidth: Metric[float] = _NO_FIGURE
    source: str = "estimated"
    estimate: Metric[float] = _NO_FIGURE
    counted: Metric[Bandwidth] = _NO_FIGURE
    peak: Metric[Peak] = _NO_FIGURE
    utilization: Metric[float] = _NO_FIGURE
    off: str = ""
    remark: str = ""
    rough: bool = False
    ceiling_plain: Metric[float] = _NO_FIGURE
    ceiling_accepted: Metric[float] = _NO_FIGURE
    bytes_per_pass: Metric[float] = _NO_FIGURE
    limit: Literal["memory", ""] = ""
    watts: Metric[float] = _NO_FIGURE
    joules_per_token: Metric[float] = _NO_FIGURE
    fits_cache: bool = False


@dataclass(frozen=True, slots=True)
class Decoding:
    """The running answer so far, or the last one: its average `tok_s`, and the `whole` of what was evaluated. `n_past`
    tokens in the context. `plain_tok_s` is what plain decoding does here."""

    tok_s: float | None = None
    whole: Evaluated = Evaluated()
    n_past: int = 0
    plain_tok_s: float | None = None


@dataclass(frozen=True, slots=True)
class Reach:
    """What the cores of the loaded model reach by the cost model: tok/s if only computing took time, and bytes per
    second of its weights (0: not known); and the newest `peak`."""

    compute_tok_s: float = 0.0
    read_bytes_per_s: float = 0.0
    peak: Peak | None = None


def _peak(model: ModelInfo, newest: Peak | None, read: float) -> Peak | None:
    """Return the read bandwidth of the cores that compute: as known, or what was `read` if that is clearly more, unless
    caches may have helped."""
    cpus = model.cpus or tuple(range(model.n_threads))
    known = Peak(model.peak_read, cpus, model.peak_at_least, model.peak_estimated)
    if newest is not None:
        known = replace(newest, cpus=cpus)
    if known.bytes_per_s <= 0:
        return None
    is_raised = read > OFF * known.bytes_per_s and _weights(model) >= PARTLY_CACHED * model.cache_bytes
    return Peak(read, cpus, at_least=True) if is_raised else known


def _read_at_best(model: ModelInfo, now: Decoding, average: float | None) -> float:
    """Return the most bytes per second that passes read which are long enough to tell: calibrated ones, plain ones
    beside drafts, and those of the answer on `average`."""
    if model.work is None:
        return 0.0
    calibrated = 1e3 / model.pass_ms[0] * bytes_read(model.work, 1, 0) if model.pass_ms else 0.0
    plain = (now.plain_tok_s or 0.0) * bytes_read(model.work, 1, now.n_past)
    return max(calibrated, plain, average or 0.0)


def fits_cache(model: ModelInfo) -> bool:
    """Return whether the weights that are read again and again stay in the L3 caches of the cores."""
    return 0 < _weights(model) <= model.cache_bytes


def _weights(model: ModelInfo) -> float:
    return sum(work.weight_bytes for work in (model.work, model.draft_work) if work is not None)


def roofline(
    model: ModelInfo | None,
    now: Decoding,
    machine: MachineSample | None = None,
    joules_per_token: float | None = None,
    reach: Reach = Reach(),
) -> Roofline:
    """Compute all figures. `machine` is the sample of the same time.

    Ceilings rest on the larger of the peak and of what `reach` says, so that no prediction exceeds them."""
    machine = machine or MachineSample()
    read, no_power = machine.bandwidth, machine.no_power or "power not read"
    watts = Metric.of(machine.power.watts if machine.power is not None else None, no_power)
    joules = Metric.of(joules_per_token, no_power if watts.value is None else "answer too short")
    no_counter = machine.no_bandwidth or "counters not read"
    if model is None:
        return Roofline(watts=watts, joules_per_token=joules, counted=missing(no_counter))
    estimate, cached = _bytes_per_s(model, now.tok_s, now.whole, now.n_past), fits_cache(model)
    average = estimate if now.whole.tokens >= _ENOUGH else None  # a fast second is no proof against a limit
    read_at_best = _read_at_best(model, now, average)
    peak = _peak(model, reach.peak, read_at_best)
    no_figure = NO_ANSWER if model.work is not None else NO_ESTIMATE
    of_target = bytes_read(model.work, now.whole.n_per_pass, now.n_past) if model.work is not None else None
    counted = read if estimate is not None else None
    bandwidth = estimate if counted is None else counted.total if counted.read is None else counted.read
    no_limit = _why_no_memory_limit(model, peak)
    utilization = None if bandwidth is None or peak is None or no_limit else bandwidth / peak.bytes_per_s
    remark = _remark(counted, estimate, cached)
    max_bytes_per_s = max(peak.bytes_per_s, reach.read_bytes_per_s) if peak is not None else 0.0
    exceeded = _PARTLY_CACHED if read_at_best > OFF * max_bytes_per_s else ""
    plain, accepted = _memory_ceilings(model, now, max_bytes_per_s, no_limit or exceeded)
    is_estimated = peak is not None and peak.estimated  # then memory is not said to limit it, nor not to
    is_memory = not (no_limit or is_estimated) and (average or 0.0) >= AT_THE_LIMIT * max_bytes_per_s
    over_peak = counted is not None and (utilization or 0.0) > OFF and not remark  # although nothing else ran
    off = f"counter above the {'estimated' if is_estimated else 'measured'} peak" if over_peak else ""
    if average is not None and peak is not None and average > OFF * peak.bytes_per_s and not cached:
        off = f"above the memory peak: {_PARTLY_CACHED}"
    return Roofline(
        bandwidth=Metric.of(bandwidth, no_figure),
        source="estimated" if counted is None else counted.source,
        estimate=Metric.of(estimate, no_figure),
        counted=Metric.of(counted, no_counter),
        peak=Metric.of(peak, "not measured · run cpuchat probe"),
        utilization=Metric.of(utilization, no_limit or no_figure),
        off=off,
        remark=remark,
        rough=bool(off) or ((is_estimated or (peak is not None and peak.at_least)) and not cached),
        ceiling_plain=plain,
        ceiling_accepted=accepted,
        bytes_per_pass=Metric.of(of_target, NO_ESTIMATE),
        limit="memory" if is_memory and (utilization or 1.0) >= _FAR_BELOW else "",
        watts=watts,
        joules_per_token=joules,
        fits_cache=cached,
    )


def _why_no_memory_limit(model: ModelInfo, peak: Peak | None) -> str:
    """Return why memory sets this model no limit that is known; "" where it does."""
    if model.work is None:
        return NO_ESTIMATE
    if fits_cache(model):
        return NO_LIMIT
    return NO_PEAK if peak is None else ""


def _bytes_per_pass(model: ModelInfo, part: Evaluated, n_past: int) -> float | None:
    if model.work is None:
        return None
    total = bytes_read(model.work, part.n_per_pass, n_past)
    if model.draft_work is not None and part.passes:
        total += bytes_read(model.draft_work, 1, n_past) * part.draft_passes / part.passes
    return total


def _bytes_per_s(model: ModelInfo, tok_s: float | None, part: Evaluated, n_past: int) -> float | None:
    """Return what is read at `tok_s` in passes like those of `part`; None where that is not known."""
    nbytes = _bytes_per_pass(model, part, n_past)
    return None if nbytes is None or tok_s is None else tok_s / part.tokens_per_pass * nbytes


def _remark(counted: Bandwidth | None, estimate: float | None, cached: bool) -> str:
    if counted is None or not estimate:
        return ""
    if counted.total > OTHER_LOAD * estimate:
        return "other load on this machine"
    if counted.total < IN_CACHE * estimate and not cached:
        return "cached, or the counter is wrong"
    return ""


def _memory_ceilings(
    model: ModelInfo, now: Decoding, read: float, no_limit: str
) -> tuple[Metric[float], Metric[float]]:
    """Return the ceilings without drafts, the same for a whole chat, and at the acceptance of the answer; `read` is
    in bytes per second."""
    if no_limit or model.work is None:
        return missing(no_limit), missing(no_limit)
    plain = read / bytes_read(model.work, 1, min(N_PAST, model.n_ctx or N_PAST))
    nbytes = _bytes_per_pass(model, now.whole, now.n_past) if now.whole.draft_n else None
    accepted = read * now.whole.tokens_per_pass / nbytes if nbytes else None
    return Metric(plain), Metric.of(accepted, "nothing drafted")


class SampleAverage:
    """Averages the samples taken while decoding."""

    def __init__(self) -> None:
        self._bandwidth: list[Bandwidth] = []
        self._power: list[tuple[Power, int]] = []  # with the tokens written by then

    def add(self, sample: MachineSample, predicted_n: int) -> None:
        if sample.bandwidth is not None:
            self._bandwidth.append(sample.bandwidth)
        if sample.power is not None:
            self._power.append((sample.power, predicted_n))

    @property
    def joules_per_token(self) -> float | None:
        if not self._power:
            return None
        (first, begun), (last, ended) = self._power[0], self._power[-1]
        return (last.joules - first.joules) / (ended - begun) if ended > begun else None

    def sample(self, last: MachineSample) -> MachineSample:
        """Return the means, with the `last` sample's reasons for what is missing, and its power if none was sampled."""
        power, bandwidth, traffic = last.power, None, self._bandwidth
        if self._power:
            power = replace(self._power[-1][0], watts=fmean(one.watts for one, _ in self._power))
        if traffic:
            read, write = _mean([one.read for one in traffic]), _mean([one.write for one in traffic])
            bandwidth = Bandwidth(fmean(one.total for one in traffic), traffic[-1].source, read, write)
        return replace(last, bandwidth=bandwidth, power=power)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def whole_answer(timings: Timings) -> Decoding:
    """Return the decoding of an answer that is complete."""
    whole, figures = Evaluated.of(timings.speculation, timings.predicted_n), timings.speculation
    n_past = max(0, timings.n_past - timings.predicted_n // 2)
    return Decoding(timings.predicted_per_second, whole, n_past, plain_rate(figures))


def plain_rate(figures: SpeculationFigures | None) -> float | None:
    """Return tok/s of plain decoding beside drafts."""
    return 1e3 / figures.plain_ms if figures is not None and figures.plain_ms else None


def after_answer(model: ModelInfo, timings: Timings, reach: Reach = Reach()) -> Roofline:
    """Return the figures of a whole answer, as the meter has them after it."""
    return roofline(model, whole_answer(timings), reach=reach)
