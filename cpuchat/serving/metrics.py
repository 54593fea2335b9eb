"""Counters of the server and figures of its answers, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cpuchat.protocol.timings import Timings
from cpuchat.telemetry.meter import ChatFigures

Result = Literal["ok", "cancelled", "refused", "queue_full", "failed"]
"""How requests end: answered, cut by the client, refused as wrong or too long or because too many wait, failed."""
ENDPOINTS: Final = ("chat", "completions", "infill", "responses", "messages", "count")
_COUNTERS: Final = {
    "model_loads": "Loads of the model; after the first one, because the worker died or the model was idle.",
    "prompt_tokens": "Prompt tokens evaluated.",
    "prompt_tokens_cached": "Prompt tokens reused from a KV cache.",
    "prompt_seconds": "Time evaluating prompts.",
    "predicted_tokens": "Tokens generated.",
    "predicted_seconds": "Time from the first to the last token.",
    "decode_steps": "Tokens generated after the first of each answer.",
    "passes": "Passes of the target model that generated these.",
    "draft_tokens": "Drafted tokens that were verified.",
    "draft_tokens_accepted": "Drafted tokens that were accepted.",
}


class ServingMetrics:
    """Counts since the start of the server. `gauges`: what they are and how many now, by name; `figures`: those of the
    answers that are written, by their slots, else of the last one."""

    def __init__(
        self, gauges: Mapping[str, tuple[str, Callable[[], float]]], figures: Callable[[], Mapping[int, ChatFigures]]
    ) -> None:
        disable_created_metrics()
        self._registry = registry = CollectorRegistry()
        labels = ("endpoint", "result")
        self.requests = Counter("cpuchat_requests", "Requests by endpoint and result.", labels, registry=registry)
        self.queued = Summary("cpuchat_queue_seconds", "Time requests spent queued.", registry=registry)
        text = "From a request's arrival to its first token, the queue included."
        self.ttft = Summary("cpuchat_time_to_first_token_seconds", text, registry=registry)
        self.counters = {name: Counter(f"cpuchat_{name}", text, registry=registry) for name, text in _COUNTERS.items()}
        for name, (text, count) in gauges.items():
            Gauge(f"cpuchat_{name}", text, registry=registry).set_function(count)
        registry.register(_Figures(figures))
        for endpoint in ENDPOINTS:
            for result in get_args(Result):
                self.requests.labels(endpoint, result)

    def count_answer(self, timings: Timings) -> None:
        """Count what the engine did for a request, also a cut one."""
        figures, steps = timings.speculation, max(timings.predicted_n - 1, 0)
        counts = {
            "prompt_tokens": timings.prompt_n,
            "prompt_tokens_cached": timings.cache_n,
            "prompt_seconds": timings.prompt_ms / 1e3,
            "predicted_tokens": timings.predicted_n,
            "predicted_seconds": timings.predicted_ms / 1e3,
            "decode_steps": steps,
            "passes": figures.passes if figures is not None and figures.passes else steps,
            "draft_tokens": timings.draft_n,
            "draft_tokens_accepted": timings.draft_n_accepted,
        }
        for name, count in counts.items():
            self.counters[name].inc(max(count, 0))

    def page(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _Figures(Collector):
    """Gauges of the answers that are written, else of the last one; a figure that is not known has no sample."""

    def __init__(self, figures: Callable[[], Mapping[int, ChatFigures]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[GaugeMetricFamily]:
        figures = self._figures()
        rates = {slot: rate for slot, one in figures.items() if (rate := one.tok_s.value) is not None}
        slots = GaugeMetricFamily("cpuchat_slot_decode_tokens_per_second", "Decode speed in a slot.", labels=["slot"])
        for slot, rate in rates.items():
            slots.add_metric([str(slot)], rate)
        yield slots
        *others, newest = figures.values()
        roofline, peak = newest.roofline, newest.roofline.peak.value
        read, utilization = roofline.estimate.value, roofline.utilization.value
        if others:  # a pass reads the weights once for all, and each meter counts them
            read = utilization = None
        for name, text, value in (
            ("decode_tokens_per_second", "Decode speed of all slots together", sum(rates.values()) if rates else None),
            ("acceptance_ratio", "Drafted tokens accepted by drafted", newest.drafting.acceptance.value),
            ("read_bandwidth_bytes_per_second", "Memory read by decoding", read),
            ("read_bandwidth_peak_bytes_per_second", "Known read bandwidth", peak and peak.bytes_per_s),
            ("bandwidth_utilization_ratio", "Memory read by decoding by that", utilization),
        ):
            yield GaugeMetricFamily(f"cpuchat_{name}", f"{text}; while nothing runs, of the last answer.", value=value)
