"""Counters of the server and figures of its answers, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Summary, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.telemetry.meter import ChatFigures

Result = Literal["ok", "cancelled", "refused", "queue_full", "failed"]
"""How requests end: answered, cut by the client, refused as wrong or too long or because too many wait, failed."""
RESULTS: Final[tuple[Result, ...]] = get_args(Result)
_COUNTERS: Final = {
    "model_loads": "Loads of the model; after the first one, because the worker died.",
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
_OF = "Of the running answer, else the last one."


class ServingMetrics:
    """Counts since the start of the server."""

    def __init__(self) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cpuchat_{name}", text, labels, registry=self._registry)

        self._requests = counter("requests", "Requests by endpoint and result.", "endpoint", "result")
        self._counters = {name: counter(name, text) for name, text in _COUNTERS.items()}
        self._queued = Summary("cpuchat_queue_seconds", "Time requests spent queued.", registry=self._registry)
        text = "From a request's arrival to its first token, the queue included."
        self._ttft = Summary("cpuchat_time_to_first_token_seconds", text, registry=self._registry)

    def count_load(self) -> None:
        """Count a load of the model, the first one included."""
        self._counters["model_loads"].inc()

    def count_request(self, endpoint: str, result: Result) -> None:
        """Count a request that has ended."""
        self._requests.labels(endpoint, result).inc()

    def count_queued(self, seconds: float) -> None:
        """Count a request that has left the queue for the engine."""
        self._queued.observe(seconds)

    def count_answer(self, timings: Timings, ttft_s: float | None) -> None:
        """Count what the engine did for a request, also a cut one. `ttft_s`: the wait in the queue included."""
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
            self._counters[name].inc(max(count, 0))
        if ttft_s is not None:
            self._ttft.observe(ttft_s)

    def page(
        self, endpoints: Iterable[str], state: Mapping[str, int], model: ModelInfo | None, now: ChatFigures
    ) -> bytes:
        """Return everything in Prometheus' text format. `state`: the numbers of requests running, waiting, and that may
        wait; `now`: the figures of the running answer, else of the last one.
        """
        for endpoint in endpoints:
            for result in RESULTS:
                self._requests.labels(endpoint, result)
        return generate_latest(_Page([*self._registry.collect(), *_gauges(state, model, now)]))


class _Page(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> list[Family]:
        return self._families


def _gauges(state: Mapping[str, int], model: ModelInfo | None, now: ChatFigures) -> Iterator[Family]:
    """Yield what is read and not counted; a figure that is not known has no sample."""
    drafting, roofline, peak = now.drafting, now.roofline, now.roofline.peak.value
    for name, text, value in (
        ("requests_running", "Requests that the engine answers now.", state["running"]),
        ("requests_waiting", "Requests in the queue.", state["waiting"]),
        ("requests_waiting_limit", "Requests that may wait.", state["limit"]),
        ("context_tokens", "Tokens of the context.", model.n_ctx if model is not None else None),
        ("decode_tokens_per_second", f"Decode speed. {_OF}", now.tok_s.value),
        ("prefill_tokens_per_second", f"Prefill speed. {_OF}", now.prefill_tok_s.value),
        ("context_used_tokens", f"Tokens in the KV cache. {_OF}", now.n_past.value),
        ("acceptance_ratio", f"Drafted tokens accepted by drafted. {_OF}", drafting.acceptance.value),
        ("tokens_per_pass", f"Tokens generated per pass of the target model. {_OF}", drafting.tokens_per_pass.value),
        ("read_bandwidth_bytes_per_second", f"Memory read by decoding, by the model's header. {_OF}",
         roofline.estimate.value),
        ("read_bandwidth_peak_bytes_per_second", "Read bandwidth measured with the same cores.",
         peak.bytes_per_s if peak is not None else None),
        ("bandwidth_utilization_ratio", f"Memory read by decoding by the measured peak. {_OF}",
         roofline.utilization.value),
    ):  # fmt: skip
        yield GaugeMetricFamily(f"cpuchat_{name}", text, value=value)
    if model is not None:
        labels = {"name": model.name, "quantization": model.quantization, "draft": model.draft}
        family = GaugeMetricFamily("cpuchat_model_info", "The model; always 1.", labels=(*labels, "threads"))
        family.add_metric((*labels.values(), str(model.n_threads)), 1)
        yield family
