"""The dialect of vLLM: tokens with every part of an answer, and server-wide metrics.

Acceptance is that of the one request where the server was started with --per-request-spec-decode-metrics, else the
differences of its counters, which hold what it drafts for others, too.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from cpuchat.backend.remote.adapter import Adapter, ListedModel, extend_template, listed, name_of
from cpuchat.backend.remote.chunk import Chunk, Numbers
from cpuchat.backend.remote.connection import Connection, Status
from cpuchat.backend.remote.metrics import Metrics, parse
from cpuchat.protocol import Generate, ServerLoad
from cpuchat.timings import SERVER_WIDE, SpeculationFigures

_TOO_LONG = re.compile(r"maximum context length is (\d{1,9}) tokens")
_NEEDED = tuple(
    re.compile(pattern)
    for pattern in (
        r"(\d{1,9}) (?:in the messages|in the prompt|input tokens)",
        r"prompt contains (?:at least )?(\d{1,9})",
        r"requested (\d{1,9}) tokens",
    )
)
_OUTPUT = re.compile(r"output tokens|in the completion|max_(?:completion_)?tokens")
"""Text in a rejection that counts Max tokens, too."""
_FLAGS = "start vLLM with --enable-per-request-metrics --enable-prompt-tokens-details"
_SPEC = "vllm:spec_decode_num_"
_RUNNING = "vllm:num_requests_running"


class VLLM(Adapter):
    """See `Adapter`. `metrics` are those of now, None when they cannot be read."""

    kind = "vLLM"
    takes_grammars = continues = True
    takes = Adapter.takes | {"top_k", "min_p", "repeat_penalty", "reasoning"}
    names: ClassVar = {"repeat_penalty": "repetition_penalty"}

    def __init__(self, connection: Connection, models: tuple[ListedModel, ...], metrics: Metrics | None) -> None:
        super().__init__(connection, models)
        self._has_metrics = metrics is not None
        self.counts_beside = metrics is not None and f"{_SPEC}drafts_total" in metrics.values
        self._before = self._now = metrics

    def _unreported(self, model: ListedModel) -> tuple[tuple[str, str], ...]:
        # Without the tokens that its prefix cache had, which the second one reports, a prefill rate means nothing.
        found = [(figure, _FLAGS) for figure in ("prefill_tok_s", "prefill_cached", "queue_s")]
        if not self._has_metrics:
            found.append(("running", "its /metrics cannot be read"))
        if self.counts_beside:
            found.append(("own_acceptance", "start vLLM with --per-request-spec-decode-metrics summary"))
        else:
            found.append(("acceptance", "speculation is off: start it with --speculative-config"))
        if not model.n_ctx:
            found.append(("n_ctx", "not reported"))
        return tuple(found)

    def extend(self, content: dict[str, Any], request: Generate) -> None:
        content["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        content["top_k"] = request.sampling.top_k or -1
        if request.ignore_eos:
            content["ignore_eos"] = True
        if request.continues:
            content |= {"continue_final_message": True, "add_generation_prompt": False}
        if request.grammar:
            content["structured_outputs"] = {"grammar": request.grammar}
        extend_template(content, request)

    def begin(self, request: Generate) -> None:
        self._before = self._now = None

    def context_sizes(self, status: Status) -> tuple[int, int] | None:
        limit = _TOO_LONG.search(status.message)
        if limit is None:
            return None
        matches = (pattern.search(status.message) for pattern in _NEEDED)
        needed = next((int(found[1]) for found in matches if found is not None), 0)
        return needed or int(limit[1]) + 1, int(limit[1])

    def counts_output(self, status: Status) -> bool:
        return _OUTPUT.search(status.message) is not None

    def chunk(self, data: dict[str, Any]) -> Chunk:
        chunk = super().chunk(data)
        metrics = Numbers(data.get("metrics"))
        if not metrics:
            return chunk
        reported, spec = chunk.reported, metrics.part("speculative_decoding")
        reported.ttft_ms = metrics.ms("time_to_first_token_ms")
        reported.queue_ms = metrics.ms("queue_time_ms")
        reported.predicted_ms = metrics.ms("generation_time_ms")
        if reported.ttft_ms is not None and reported.queue_ms is not None:
            reported.prompt_ms = max(0.0, reported.ttft_ms - reported.queue_ms)
        reported.draft_n = spec.count("num_draft_tokens")
        reported.draft_n_accepted = spec.count("num_accepted_draft_tokens")
        chunk.lies += metrics.lies + spec.lies
        return chunk

    async def load(self, request_id: int) -> ServerLoad | None:
        if not self._has_metrics:
            return None
        found = parse((await self.connection.get_bytes("/metrics")).decode(errors="replace"))
        self._now = found
        if self._before is None:
            self._before = found
        return ServerLoad(
            request_id=request_id,
            running=found.count(_RUNNING),
            waiting=found.count("vllm:num_requests_waiting"),
            kv_used=found.mean("vllm:kv_cache_usage_perc"),
        )

    def speculation(self, predicted_n: int) -> SpeculationFigures | None:
        before, now = self._before, self._now
        if before is None or now is None or before is now:
            return None
        drafts = now.since(before, f"{_SPEC}drafts_total")
        drafted = now.since(before, f"{_SPEC}draft_tokens_total")
        accepted = now.since(before, f"{_SPEC}accepted_tokens_total")
        if not drafts or not drafted or accepted is None or accepted > drafted:
            return None
        # A pass writes what it accepts and one token more, whether it drafted or not.
        generated = now.since(before, "vllm:generation_tokens_total") or drafts + accepted
        share = (generated - accepted) / generated if generated > accepted else drafts / (drafts + accepted)
        by_position = now.positions_since(before, f"{_SPEC}accepted_tokens_per_pos_total")
        return SpeculationFigures(
            passes=max(1, round((predicted_n - 1) * share)),
            draft_n=int(drafted),
            draft_n_accepted=int(accepted),
            recent_draft_n=int(drafted),
            recent_draft_n_accepted=int(accepted),
            by_position=tuple((int(drafts), min(int(drafts), count)) for count in by_position),
            source=SERVER_WIDE,
        )

    async def is_idle(self, seed: int) -> bool | None:
        if not self._has_metrics:
            return None
        before = self._now.count(_RUNNING) if self._now is not None else None
        now = parse((await self.connection.get_bytes("/metrics")).decode(errors="replace")).count(_RUNNING)
        if now == 0:
            return True
        # Requests of others may have begun since the last look: then nothing is known of this one.
        return False if before == now == 1 else None


def parse_models(data: dict[str, Any]) -> tuple[ListedModel, ...]:
    """Return the models of `/v1/models`."""
    return tuple(
        ListedModel(name, n_ctx=Numbers(entry).count("max_model_len") or 0, loaded=True)
        for entry in listed(data)
        if (name := name_of(entry))
    )
