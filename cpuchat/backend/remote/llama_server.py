"""The dialect of llama-server: timings with every part of an answer, progress of the prompt, slots, reasoning control.

Fields: tools/server of llama.cpp (README.md; `server_slot_stats`, `result_prompt_progress`).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Any

import httpx

from cpuchat.backend.remote.adapter import OPTIONS, Adapter, ListedModel, extend_template, listed, name_of
from cpuchat.backend.remote.chunk import Chunk, Numbers, Reported
from cpuchat.backend.remote.connection import Connection, Status
from cpuchat.backend.remote.metrics import parse
from cpuchat.backend.remote.stream import decoded, valid_text
from cpuchat.errors import CpuchatError
from cpuchat.model_info import ModelInfo
from cpuchat.protocol import Generate, Message, ServerLoad

_NO_METRICS = "start llama-server with --metrics"
_TOO_LONG = "exceed_context_size_error"
_SEED_LIMIT = 0xFFFFFFFF  # llama.cpp draws a seed of its own for this one


class LlamaServer(Adapter):
    """See `Adapter`. `props` is the content of `/props`."""

    kind = "llama-server"
    takes_grammars = continues = True
    takes = frozenset(OPTIONS)
    no_drafts = "speculation is off: start it with --spec-default or --spec-draft-model"

    def __init__(self, connection: Connection, models: tuple[ListedModel, ...], props: dict[str, Any]) -> None:
        super().__init__(connection, models)
        self._has_metrics = props.get("endpoint_metrics") is True
        self._has_slots = props.get("endpoint_slots") is not False
        self._is_drafting = False
        self._is_router = len(models) > 1
        self._is_own_seed = False  # nobody else has it

    async def describe(self, name: str) -> ModelInfo:
        model = self.choose(name)
        if not self._is_router:
            with contextlib.suppress(Status, httpx.HTTPError, CpuchatError):
                self._is_drafting = any(slot.get("speculative") is True for slot in await self._slots())
        return self._info(model)

    def _unreported(self, model: ListedModel) -> tuple[tuple[str, str], ...]:
        found = [("kv_used", f"not reported by {self.kind}")]
        if not self._has_metrics:
            found.append(("running", _NO_METRICS))
        if not self._is_drafting:
            found.append(("acceptance", self.no_drafts))
        if not model.n_ctx:
            found.append(("n_ctx", "known once the model is loaded"))
        return tuple(found)

    def begin(self, request: Generate) -> None:
        self._is_own_seed = request.sampling.seed is None

    def extend(self, content: dict[str, Any], request: Generate) -> None:
        sampling = request.sampling
        content |= {
            "seed": content["seed"] % _SEED_LIMIT,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "cache_prompt": True,
            "timings_per_token": True,
            "return_progress": True,
            "reasoning_control": True,
        }
        if salt := os.environ.get("CPUCHAT_CACHE_SALT"):  # of an app in a browser tab
            content["cache_salt"] = salt
        if request.ignore_eos:
            content["ignore_eos"] = True
        if request.grammar:
            content["grammar"] = request.grammar
        if request.reasoning_budget is not None:
            content["reasoning_budget_tokens"] = request.reasoning_budget
        extend_template(content, request)

    def message(self, message: Message) -> dict[str, Any]:
        found = super().message(message)
        return {**found, "reasoning_content": message.reasoning} if message.reasoning else found

    def context_sizes(self, status: Status) -> tuple[int, int] | None:
        if status.error.get("type") != _TOO_LONG:
            return None
        error = Numbers(status.error)
        needed, n_ctx = error.count("n_prompt_tokens"), error.count("n_ctx")
        return (needed, n_ctx) if needed and n_ctx else None

    def chunk(self, data: dict[str, Any]) -> Chunk:
        chunk = super().chunk(data)
        timings = Numbers(data.get("timings"))
        if timings:
            # `usage` counts the same, but without what was reused.
            chunk.reported = Reported(
                cache_n=timings.count("cache_n"),
                prompt_n=timings.count("prompt_n"),
                prompt_ms=timings.ms("prompt_ms"),
                predicted_n=timings.count("predicted_n") or None,
                predicted_ms=timings.ms("predicted_ms"),
                draft_n=timings.count("draft_n"),
                draft_n_accepted=timings.count("draft_n_accepted"),
            )
            chunk.lies += timings.lies
        progress = Numbers(data.get("prompt_progress"))
        if progress:
            total, processed = progress.count("total"), progress.count("processed")
            if total and processed is not None:
                chunk.progress = processed, total, progress.count("cache") or 0
            chunk.lies += progress.lies
        return chunk

    async def load(self, request_id: int) -> ServerLoad | None:
        if not self._has_metrics:
            return None
        text = (await self.connection.get_bytes("/metrics")).decode(errors="replace")
        count = parse(text).count
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
    no_drafts = "speculation is off: start it with --drafters auto"

    def extend(self, content: dict[str, Any], request: Generate) -> None:
        super().extend(content, request)
        content["return_queue"] = True

    def chunk(self, data: dict[str, Any]) -> Chunk:
        error = data.get("error")
        if isinstance(error, dict) and error.get("type") == _TOO_LONG:  # after the queue, when the response has begun
            raise Status(400, error, None)
        chunk, queue = super().chunk(data), Numbers(data.get("queue"))
        chunk.ahead = queue.count("ahead")
        chunk.reported.queue_ms = queue.ms("ms")
        chunk.lies += queue.lies
        return chunk


def parse_models(data: dict[str, Any], props: dict[str, Any]) -> tuple[ListedModel, ...]:
    """Return the models of `/v1/models`; the context size of a single one also from `/props`."""
    found: list[ListedModel] = []
    for entry in listed(data):
        meta = Numbers(entry.get("meta"))
        status = entry.get("status")
        value = status.get("value") if isinstance(status, dict) else "loaded"
        ftype = entry["meta"].get("ftype") if isinstance(entry.get("meta"), dict) else None
        if name := name_of(entry):
            found.append(
                ListedModel(
                    name,
                    quantization=_quantization(valid_text(ftype)),
                    size=meta.count("size") or 0,
                    n_params=meta.count("n_params") or 0,
                    n_ctx=meta.count("n_ctx") or 0,
                    n_ctx_train=meta.count("n_ctx_train") or 0,
                    n_vocab=meta.count("n_vocab") or 0,
                    loaded=value == "loaded",
                )
            )
    if len(found) == 1 and not found[0].n_ctx:
        n_ctx = Numbers(props.get("default_generation_settings")).count("n_ctx") or 0
        found = [replace(found[0], n_ctx=n_ctx)]
    return tuple(found)


def _quantization(ftype: str) -> str:
    """Return `Q4_K_M` for llama.cpp's `Q4_K - Medium`."""
    kind, _, size = ftype.partition(" - ")
    return f"{kind.split(' ')[0]}{f'_{size[0]}' if size else ''}"[:20]
