"""Counters of a server, and their text in Prometheus' exposition format (version 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from cpuchat.model_info import ModelInfo
from cpuchat.telemetry.meter import Figures
from cpuchat.timings import Timings

_PREFIX = "cpuchat_"

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RESULTS = ("ok", "cancelled", "refused", "queue_full", "failed")
"""How requests end: answered, cut by the client, refused as wrong or too long or because too many wait, failed."""
Result = Literal["ok", "cancelled", "refused", "queue_full", "failed"]


class Metrics:
    """Counts since the start of the server."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.loads = 0
        """Loads of the model, the first one included."""
        self._sums: Counter[str] = Counter()
        self._seconds: dict[str, float] = {"queue": 0.0, "prompt": 0.0, "predicted": 0.0, "ttft": 0.0}
        self._positions: list[tuple[int, int]] = []

    def count_request(self, endpoint: str, result: Result) -> None:
        """Count a request that has ended."""
        self.requests[endpoint, result] += 1

    def count_queued(self, seconds: float) -> None:
        """Count a request that has left the queue for the engine."""
        self._sums["queue"] += 1
        self._seconds["queue"] += seconds

    def count_answer(self, timings: Timings, ttft_s: float | None, figured_n: int | None = None) -> None:
        """Count what the engine did for a request, also a cut one. `ttft_s`: the wait in the queue included;
        `figured_n`: tokens that `timings.speculation` is about, None = all.
        """
        figures = timings.speculation
        # Steps and passes are about the same tokens; what a cut answer wrote after its last figures is in neither.
        steps = max((timings.predicted_n if figured_n is None else figured_n) - 1, 0)
        self._sums.update(
            prompt=timings.prompt_n,
            cached=timings.cache_n,
            predicted=timings.predicted_n,
            steps=steps,
            passes=figures.passes if figures is not None and figures.passes else steps,
            drafted=timings.draft_n,
            accepted=timings.draft_n_accepted,
        )
        self._seconds["prompt"] += timings.prompt_ms / 1e3
        self._seconds["predicted"] += timings.predicted_ms / 1e3
        if ttft_s is not None:
            self._sums["ttft"] += 1
            self._seconds["ttft"] += ttft_s
        for position, (drafted, accepted) in enumerate(figures.by_position if figures is not None else ()):
            if position == len(self._positions):
                self._positions.append((0, 0))
            before = self._positions[position]
            self._positions[position] = (before[0] + drafted, before[1] + accepted)

    def text(self, endpoints: Iterable[str], state: Mapping[str, int], model: ModelInfo | None, now: Figures) -> str:
        """Return everything as text. `state`: the numbers of requests running, waiting, and that may wait; `now`: the
        figures of the running answer, else of the last one.
        """
        page = _Page()
        page.family("requests_total", "counter", "Requests by endpoint and result.")
        for endpoint in endpoints:
            for result in RESULTS:
                page.sample("requests_total", self.requests[endpoint, result], endpoint=endpoint, result=result)
        page.one("requests_running", "gauge", "Requests that the engine answers now.", state["running"])
        page.one("requests_waiting", "gauge", "Requests in the queue.", state["waiting"])
        page.one("requests_waiting_limit", "gauge", "Requests that may wait.", state["limit"])
        self._add_counts(page)
        self._add_llama_names(page, state)
        self._add_figures(page, now)
        if model is not None:
            page.one("context_tokens", "gauge", "Tokens of the context.", model.n_ctx)
            page.family("model_info", "gauge", "The model; always 1.")
            page.sample(
                "model_info", 1, name=model.name, quantization=model.quantization, draft=model.draft,
                threads=str(model.n_threads),
            )  # fmt: skip
        return page.text

    def _add_counts(self, page: _Page) -> None:
        sums, seconds = self._sums, self._seconds
        loads = "Loads of the model; after the first one, because the worker died."
        page.one("model_loads_total", "counter", loads, self.loads)
        page.one("prompt_tokens_total", "counter", "Prompt tokens evaluated.", sums["prompt"])
        page.one("prompt_tokens_cached_total", "counter", "Prompt tokens reused from a KV cache.", sums["cached"])
        page.one("prompt_seconds_total", "counter", "Time evaluating prompts.", seconds["prompt"])
        page.one("predicted_tokens_total", "counter", "Tokens generated.", sums["predicted"])
        page.one("predicted_seconds_total", "counter", "Time from the first to the last token.", seconds["predicted"])
        page.one("decode_steps_total", "counter", "Tokens generated after the first of each answer.", sums["steps"])
        page.one("passes_total", "counter", "Passes of the target model that generated these.", sums["passes"])
        page.one("draft_tokens_total", "counter", "Drafted tokens that were verified.", sums["drafted"])
        page.one("draft_tokens_accepted_total", "counter", "Drafted tokens that were accepted.", sums["accepted"])
        for name, part in (("draft_tokens_per_position_total", 0), ("draft_tokens_accepted_per_position_total", 1)):
            page.family(name, "counter", "Drafted tokens verified (accepted), by position in the draft, from 0.")
            for position, counts in enumerate(self._positions):
                page.sample(name, counts[part], position=str(position))
        for name, key, text in (
            ("queue_seconds", "queue", "Time requests spent queued."),
            ("time_to_first_token_seconds", "ttft", "From a request's arrival to its first token, the queue included."),
        ):
            page.family(name, "summary", text)
            page.sample(f"{name}_sum", seconds[key])
            page.sample(f"{name}_count", sums[key])

    def _add_llama_names(self, page: _Page, state: Mapping[str, int]) -> None:
        """Add what llama-server tells too, by its names: for dashboards and programs that know that server."""
        sums, seconds = self._sums, self._seconds
        drafts = self._positions[0][0] if self._positions else 0  # each has a first token
        for name, kind, value in (
            ("prompt_tokens_total", "counter", sums["prompt"]),
            ("prompt_tokens_cached_total", "counter", sums["cached"]),
            ("prompt_seconds_total", "counter", seconds["prompt"]),
            ("tokens_predicted_total", "counter", sums["predicted"]),
            ("tokens_predicted_seconds_total", "counter", seconds["predicted"]),
            ("spec_decode_num_drafts_total", "counter", drafts),
            ("spec_decode_num_draft_tokens_total", "counter", sums["drafted"]),
            ("spec_decode_num_accepted_tokens_total", "counter", sums["accepted"]),
            ("requests_processing", "gauge", state["running"]),
            ("requests_deferred", "gauge", state["waiting"]),
        ):
            page.one(name, kind, "As llama-server's.", value, prefix="llamacpp:")
        by_position = "spec_decode_num_accepted_tokens_per_pos_total"
        page.family(by_position, "counter", "As llama-server's.", prefix="llamacpp:")
        for position, (_, accepted) in enumerate(self._positions):
            page.sample(by_position, accepted, prefix="llamacpp:", position=str(position))

    def _add_figures(self, page: _Page, now: Figures) -> None:
        """Add the gauges; one that is not known has no sample."""
        drafting, roofline = now.drafting, now.roofline
        rate = now.decode_tok_s if now.live_tok_s is None else now.live_tok_s
        page.maybe("decode_tokens_per_second", "Decode speed.", rate)
        page.maybe("prefill_tokens_per_second", "Prefill speed.", now.prefill_tok_s)
        page.maybe("context_used_tokens", "Tokens in the KV cache.", now.n_past)
        page.maybe("acceptance_ratio", "Drafted tokens accepted by drafted.", drafting.acceptance)
        page.maybe("tokens_per_pass", "Tokens generated per pass of the target model.", drafting.tokens_per_pass)
        read = "Memory read by decoding, by the model's header."
        page.maybe("read_bandwidth_bytes_per_second", read, roofline.estimate)
        peak = roofline.peak.bytes_per_s if roofline.peak is not None else None
        page.maybe("read_bandwidth_peak_bytes_per_second", "Read bandwidth measured with the same cores.", peak)
        page.maybe("bandwidth_utilization_ratio", "Memory read by decoding by the measured peak.", roofline.utilization)


class _Page:
    """Lines of the format: `# HELP`, `# TYPE`, samples."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def family(self, name: str, kind: str, help: str, *, prefix: str = _PREFIX) -> None:
        self._lines += [f"# HELP {prefix}{name} {help}", f"# TYPE {prefix}{name} {kind}"]

    def sample(self, name: str, value: float, /, *, prefix: str = _PREFIX, **labels: str) -> None:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        self._lines.append(f"{prefix}{name}{{{inside}}} {value:.10g}" if inside else f"{prefix}{name} {value:.10g}")

    def one(self, name: str, kind: str, help: str, value: float, *, prefix: str = _PREFIX) -> None:
        self.family(name, kind, help, prefix=prefix)
        self._lines.append(f"{prefix}{name} {value:.10g}")

    def maybe(self, name: str, help: str, value: float | None) -> None:
        self.family(name, "gauge", f"{help} Of the running answer, else the last one.")
        if value is not None:
            self.sample(name, value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
