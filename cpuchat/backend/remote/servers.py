"""The dialects of servers, and finding out which of them answers at an address, by what it reports.

Sources: tools/server of llama.cpp (README.md; `server_slot_stats`, `result_prompt_progress`), the REST API v0 of LM
Studio, docs/api.md of Ollama (times in nanoseconds), vLLM. vLLM's acceptance is that of the one request where the
server was started with --per-request-spec-decode-metrics, else the differences of its counters, which hold what it
drafts for others, too.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from cpuchat.backend.remote.adapter import (
    FAILURES,
    OPTIONS,
    Adapter,
    ListedModel,
    Metrics,
    extend_engine,
    listed,
    models_in,
    read_metrics,
    value_at,
)
from cpuchat.backend.remote.connection import SILENCE, Connection, Status
from cpuchat.backend.remote.stream import Chunk, Numbers, decoded, valid_text
from cpuchat.base.errors import ServerError
from cpuchat.config.servers import host
from cpuchat.protocol.messages import Generate, ServerLoad
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import SERVER_WIDE, SpeculationFigures

_OVER_CONTEXT_TYPE = "exceed_context_size_error"
_SEED_LIMIT = 0xFFFFFFFF  # llama.cpp draws a seed of its own for this one


class LlamaServer(Adapter):
    """See `Adapter`. `props` is the content of `/props`."""

    kind = "llama-server"
    takes_grammars = continues = True
    takes = frozenset(OPTIONS)
    reasoning_field = "reasoning_content"
    constants: ClassVar = Adapter.constants | dict.fromkeys(
        ("cache_prompt", "timings_per_token", "return_progress", "reasoning_control"), True
    )
    figures: ClassVar = Adapter.figures | {
        "timings": {name: name for name in (
            "cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "draft_n", "draft_n_accepted",
        )},
    }  # fmt: skip

    def __init__(self, connection: Connection, models: tuple[ListedModel, ...], props: dict[str, Any]) -> None:
        super().__init__(connection, models)
        if props.get("endpoint_metrics") is True:
            self.has.add("metrics")
        self._has_slots = props.get("endpoint_slots") is not False
        self._is_router = len(models) > 1
        self._is_own_seed = False  # nobody else has it

    async def describe(self, name: str) -> ModelInfo:
        model = self.choose(name)
        if not self._is_router:
            with contextlib.suppress(*FAILURES):
                if any(slot.get("speculative") is True for slot in await self._slots()):
                    self.has.add("drafts")
        return self._info(model)

    def begin(self, request: Generate) -> None:
        self._is_own_seed = request.sampling.seed is None

    def extend(self, content: dict[str, Any], request: Generate) -> None:
        sampling = request.sampling
        content |= {
            "seed": content["seed"] % _SEED_LIMIT,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        if request.grammar:
            content["grammar"] = request.grammar
        if request.reasoning_budget is not None:
            content["reasoning_budget_tokens"] = request.reasoning_budget
        extend_engine(content, request)

    def context_sizes(self, status: Status) -> tuple[int, int] | None:
        if status.error.get("type") != _OVER_CONTEXT_TYPE:
            return None
        error = Numbers(status.error)
        needed, n_ctx = error.count("n_prompt_tokens"), error.count("n_ctx")
        return (needed, n_ctx) if needed and n_ctx else None

    def chunk(self, data: dict[str, Any]) -> Chunk:
        # `usage` counts the same as `timings`, but without what was reused.
        chunk = super().chunk({**data, "usage": None} if data.get("timings") else data)
        if data.get("timings"):
            chunk.reported.predicted_n = chunk.reported.predicted_n or None
        progress = Numbers(data.get("prompt_progress"))
        total, processed = progress.count("total"), progress.count("processed")
        if total and processed is not None:
            chunk.progress = processed, total, progress.count("cache") or 0
        chunk.lies += progress.lies
        return chunk

    async def load(self, request_id: int) -> ServerLoad | None:
        if "metrics" not in self.has:
            return None
        count = (await read_metrics(self.connection)).count
        return ServerLoad(
            request_id=request_id,
            running=count("llamacpp:requests_processing"),
            waiting=count("llamacpp:requests_deferred"),
        )

    async def is_idle(self, seed: int) -> bool | None:
        if not self._has_slots:
            return None
        is_sure = True
        for slot in await self._slots():
            if not slot.get("is_processing"):
                continue
            params = slot.get("params")
            found = params.get("seed") if isinstance(params, dict) else None
            if found == seed % _SEED_LIMIT and self._is_own_seed:
                return False
            # A slot that does not show its seed may be this one, and a seed from the settings may be another client's.
            is_sure = is_sure and found not in (None, seed % _SEED_LIMIT)
        return True if is_sure else None

    async def _slots(self) -> list[dict[str, Any]]:
        """Return the slots. Raises Status, httpx.HTTPError, ServerError."""
        body = await self.connection.get_bytes("/slots")
        found = decoded(b'{"slots":' + body + b"}").get("slots")
        return [slot for slot in found if isinstance(slot, dict)] if isinstance(found, list) else []

    async def end_reasoning(self, answer_id: str) -> bool:
        wanted = {"id": answer_id, "action": "reasoning_end"}
        answer = await self.connection.post("/v1/chat/completions/control", wanted)
        return answer.get("success") is True


class CpuchatServe(LlamaServer):
    """`cpuchat serve`, which speaks this dialect."""

    kind = "cpuchat serve"
    continues = False
    constants: ClassVar = LlamaServer.constants | {"return_queue": True}
    figures: ClassVar = LlamaServer.figures | {"queue": {"queue_ms": "ms"}}

    def chunk(self, data: dict[str, Any]) -> Chunk:
        if value_at(data, "error.type") == _OVER_CONTEXT_TYPE:  # after the queue, when the response has begun
            raise Status(400, data["error"], None)
        chunk, queue = super().chunk(data), Numbers(data.get("queue"))
        chunk.ahead = queue.count("ahead")
        chunk.lies += queue.lies
        return chunk


def _llama_server_models(data: dict[str, Any], props: dict[str, Any]) -> tuple[ListedModel, ...]:
    """Return the models of `/v1/models`; the context size of a single one also from `/props`."""
    names = ("size", "n_params", "n_ctx", "n_ctx_train", "n_vocab")
    entries = models_in(data, quantization="meta.ftype", **{name: f"meta.{name}" for name in names})
    found = [
        replace(
            model,
            quantization=_quantization(model.quantization),
            loaded=not isinstance(entry.get("status"), dict) or entry["status"].get("value") == "loaded",
        )
        for entry, model in entries
    ]
    if len(found) == 1 and not found[0].n_ctx:
        n_ctx = Numbers(props.get("default_generation_settings")).count("n_ctx") or 0
        found = [replace(found[0], n_ctx=n_ctx)]
    return tuple(found)


def _quantization(ftype: str) -> str:
    """Return `Q4_K_M` for llama.cpp's `Q4_K - Medium`."""
    kind, _, size = ftype.partition(" - ")
    return f"{kind.split(' ')[0]}{f'_{size[0]}' if size else ''}"[:20]


class LMStudio(Adapter):
    """See `Adapter`."""

    kind = "LM Studio"
    takes = Adapter.takes | {"top_k", "min_p", "repeat_penalty"}
    figures: ClassVar = Adapter.figures | {
        "stats": {"draft_n": "total_draft_tokens_count", "draft_n_accepted": "accepted_draft_tokens_count"}
    }


def _lm_studio_models(data: dict[str, Any]) -> tuple[ListedModel, ...]:
    """Return the models of `/api/v0/models` that answer."""
    entries = models_in(
        data, quantization="quantization", architecture="arch",
        n_ctx="loaded_context_length", n_ctx_train="max_context_length",
    )  # fmt: skip
    return tuple(
        replace(model, loaded=entry.get("state") == "loaded")
        for entry, model in entries
        if entry.get("type") != "embeddings"
    )


_NS = 1e-6  # in ms
# The first token comes from the prompt, whose time `prompt_eval_duration` includes. `prompt_eval_count` holds reused
# tokens, too (numPromptInputs in its runner), so there is no rate.
_OLLAMA_FIGURES = {
    "prompt_total": "prompt_eval_count", "prompt_ms": "prompt_eval_duration", "predicted_n": "eval_count",
    "predicted_ms": "eval_duration", "load_ms": "load_duration",
}  # fmt: skip
_OVER_CONTEXT = re.compile(r"exceeds? (?:the )?(?:available |maximum )?context")


class Ollama(Adapter):
    """See `Adapter`."""

    kind = "Ollama"
    by_line = True
    arguments_as_text = False
    reasoning_field = "thinking"
    takes = frozenset(OPTIONS) - {"reasoning_budget"}
    # Otherwise it leaves out the oldest messages without a word.
    constants: ClassVar = {"stream": True, "truncate": False, "shift": False}

    async def describe(self, name: str) -> ModelInfo:
        model = self.choose(name)
        if not model.n_ctx:
            # Only a loaded model has its context size: an empty request loads it.
            with contextlib.suppress(*FAILURES):
                await self.connection.post("/api/generate", {"model": model.name, "stream": False}, SILENCE)
                self.models = await _ollama_models(self.connection)
                model = self.choose(model.name)
        return self._info(model)

    def request(self, request: Generate, model: str, seed: int) -> tuple[str, dict[str, Any]]:
        wanted = {**msgspec.structs.asdict(request.sampling), "seed": seed, "num_predict": request.max_tokens or -1}
        options: dict[str, Any] = {name: value for name, value in wanted.items() if name not in request.unset}
        if request.stop:
            options["stop"] = list(request.stop)
        content: dict[str, Any] = {"model": model, **self.constants, "options": options}
        if request.json_schema:
            content["format"] = json.loads(request.json_schema)
        if request.reasoning is not None:
            content["think"] = request.reasoning
        if request.tools:
            content["tools"] = [tool.declaration() for tool in request.tools]
        if request.prompt is not None:
            return "/api/generate", {**content, "prompt": request.prompt, "raw": True}
        return "/api/chat", {**content, "messages": [self.message(one) for one in request.messages]}

    def context_sizes(self, status: Status) -> tuple[int, int] | None:
        if status.code != 400 or _OVER_CONTEXT.search(status.message) is None:
            return None
        n_ctx = next((model.n_ctx for model in self.models if model.loaded and model.n_ctx), 0)
        return (n_ctx + 1, n_ctx) if n_ctx else None  # it reports neither

    def chunk(self, data: dict[str, Any]) -> Chunk:
        if data.get("error"):
            raise self.failure(data["error"])
        message = data.get("message")
        chunk = Chunk(content=valid_text(data.get("response")))
        if isinstance(message, dict):
            chunk.content = valid_text(message.get("content"))
            chunk.reasoning = valid_text(message.get("thinking"))
            chunk.calls = message.get("tool_calls")
        if data.get("done") is True:
            chunk.finish = valid_text(data.get("done_reason")) or "stop"
            chunk.report(data, _OLLAMA_FIGURES, _NS)
        return chunk


async def _ollama_models(connection: Connection) -> tuple[ListedModel, ...]:
    """Return the models on the server, with the context of those that are loaded. Raises Status, httpx.HTTPError,
    ServerError: as a connection does.
    """
    contexts: dict[str, int] = {}
    with contextlib.suppress(*FAILURES):
        running = models_in(await connection.get("/api/ps"), "models", "name", n_ctx="context_length")
        contexts = {model.name: model.n_ctx for _, model in running}
    entries = models_in(
        await connection.get("/api/tags"), "models", "name",
        quantization="details.quantization_level", size="size", architecture="details.family",
    )  # fmt: skip
    return tuple(
        replace(model, n_ctx=contexts.get(model.name, 0), loaded=model.name in contexts) for _, model in entries
    )


_CONTEXT_LENGTH = re.compile(r"maximum context length is (\d{1,9}) tokens")
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
_SPEC = "vllm:spec_decode_num_"
_RUNNING = "vllm:num_requests_running"


class VLLM(Adapter):
    """See `Adapter`. `metrics` are those of now, None when they cannot be read."""

    kind = "vLLM"
    takes_grammars = continues = True
    takes = Adapter.takes | {"top_k", "min_p", "repeat_penalty", "reasoning"}
    names: ClassVar = {"repeat_penalty": "repetition_penalty"}
    constants: ClassVar = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    figures: ClassVar = Adapter.figures | {
        "metrics": {
            "ttft_ms": "time_to_first_token_ms", "queue_ms": "queue_time_ms", "predicted_ms": "generation_time_ms",
        },
        "metrics.speculative_decoding": {
            "draft_n": "num_draft_tokens", "draft_n_accepted": "num_accepted_draft_tokens",
        },
    }  # fmt: skip

    def __init__(self, connection: Connection, models: tuple[ListedModel, ...], metrics: Metrics | None) -> None:
        super().__init__(connection, models)
        self.counts_beside = metrics is not None and f"{_SPEC}drafts_total" in metrics.values
        if metrics is not None:
            self.has |= {"metrics", "drafts"} if self.counts_beside else {"metrics"}
        self._before = self._now = metrics

    def extend(self, content: dict[str, Any], request: Generate) -> None:
        content["top_k"] = request.sampling.top_k or -1
        if request.continues:
            content |= {"continue_final_message": True, "add_generation_prompt": False}
        if request.grammar:
            content["structured_outputs"] = {"grammar": request.grammar}
        extend_engine(content, request)

    def begin(self, request: Generate) -> None:
        self._before = self._now = None

    def context_sizes(self, status: Status) -> tuple[int, int] | None:
        limit = _CONTEXT_LENGTH.search(status.message)
        if limit is None:
            return None
        matches = (pattern.search(status.message) for pattern in _NEEDED)
        needed = next((int(found[1]) for found in matches if found is not None), 0)
        return needed or int(limit[1]) + 1, int(limit[1])

    def counts_output(self, status: Status) -> bool:
        return _OUTPUT.search(status.message) is not None

    def chunk(self, data: dict[str, Any]) -> Chunk:
        chunk = super().chunk(data)
        reported = chunk.reported
        if reported.ttft_ms is not None and reported.queue_ms is not None:
            reported.prompt_ms = max(0.0, reported.ttft_ms - reported.queue_ms)
        return chunk

    async def load(self, request_id: int) -> ServerLoad | None:
        if "metrics" not in self.has:
            return None
        self._now = found = await read_metrics(self.connection)
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
        if "metrics" not in self.has:
            return None
        before = self._now.count(_RUNNING) if self._now is not None else None
        now = (await read_metrics(self.connection)).count(_RUNNING)
        if now == 0:
            return True
        # Requests of others may have begun since the last look: then nothing is known of this one.
        return False if before == now == 1 else None


async def identify(connection: Connection) -> Adapter:
    """Return the adapter for the server, with its models.

    `owned_by` in the list of models names most servers; one that says something else is asked for what only one of them
    has. Raises Status, httpx.HTTPError: it is not reached, or refuses; ServerError: it is not an inference server.
    """
    models = await _models(connection)
    owners = {str(entry.get("owned_by")) for entry in listed(models)}
    if "vllm" in owners:
        metrics = None
        with contextlib.suppress(*FAILURES):
            metrics = await read_metrics(connection)
        found = models_in(models, n_ctx="max_model_len")
        return VLLM(connection, tuple(replace(model, loaded=True) for _, model in found), metrics)
    if "organization_owner" in owners and listed(found := await _object(connection, "/api/v0/models")):
        return LMStudio(connection, _lm_studio_models(found))
    if not owners & {"llamacpp", "openai", "cpuchat"}:  # Ollama names the owner of each model's repository
        found = await _object(connection, "/api/version")
        if isinstance(found.get("version"), str) and "models" in await _object(connection, "/api/tags"):
            return Ollama(connection, await _ollama_models(connection))
    if "openai" not in owners:
        props = await _object(connection, "/props")
        if isinstance(props.get("default_generation_settings"), dict) or "llamacpp" in owners:
            kind = CpuchatServe if "cpuchat" in owners else LlamaServer
            return kind(connection, _llama_server_models(models, props), props)
    return Adapter(connection, tuple(model for _, model in models_in(models)))


async def _models(connection: Connection) -> dict[str, Any]:
    """Return the list of models; where the address is already that of the OpenAI routes, `/v1` is left out. Raises
    Status, httpx.HTTPError, ServerError: as `identify`.
    """
    try:
        body = await connection.get_bytes(f"{connection.root}/models")
    except Status as status:
        if status.code != 404 or not connection.server.count("/") > 2:
            raise
        body = await connection.get_bytes(f"{connection.server}/models")
        connection.root = connection.server
    found = decoded(b'{"data": %b}' % body if body.lstrip().startswith(b"[") else body)  # Together's is a list alone
    found = {**found, "data": found.get("data") or found.get("models")}
    if not isinstance(found["data"], list) and found.get("object") != "list":
        raise ServerError(
            f"{host(connection.server)} is not an OpenAI-compatible server.", "Check the address and the port."
        )
    return found


async def _object(connection: Connection, path: str) -> dict[str, Any]:
    try:
        return await connection.get(path)
    except FAILURES:
        return {}
