"""The dialect of Ollama: its own routes, whose last object reports tokens and times.

Fields: docs/api.md of Ollama. Times in nanoseconds.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import httpx
import msgspec

from cpuchat.backend.remote.adapter import OPTIONS, Adapter, ListedModel, listed, name_of
from cpuchat.backend.remote.chunk import Chunk, Numbers, Reported
from cpuchat.backend.remote.connection import SILENCE, Connection, Status
from cpuchat.backend.remote.stream import valid_text
from cpuchat.errors import CpuchatError
from cpuchat.model_info import ModelInfo
from cpuchat.protocol import Generate, Message

_NS = 1e-6  # in ms
_TOO_LONG = re.compile(r"exceeds? (?:the )?(?:available |maximum )?context")


class Ollama(Adapter):
    """See `Adapter`."""

    kind = "Ollama"
    by_line = True
    arguments_as_text = False
    takes = frozenset(OPTIONS) - {"reasoning_budget"}
    unreported = (
        ("tokens", "reported at the end of the answer"),
        ("prefill_tok_s", "reused tokens not reported"),
        ("prefill_cached", "not reported"),
        ("running", "not reported"),
        ("acceptance", "not reported by Ollama"),
    )

    async def describe(self, name: str) -> ModelInfo:
        model = self.choose(name)
        if not model.n_ctx:
            # Only a loaded model has its context size: an empty request loads it.
            with contextlib.suppress(Status, httpx.HTTPError, CpuchatError):
                await self.connection.post("/api/generate", {"model": model.name, "stream": False}, SILENCE)
                self.models = await fetch_models(self.connection)
                model = self.choose(model.name)
        return self._info(model)

    def _unreported(self, model: ListedModel) -> tuple[tuple[str, str], ...]:
        return self.unreported if model.n_ctx else (*self.unreported, ("n_ctx", "known once the model is loaded"))

    def request(self, request: Generate, model: str, seed: int) -> tuple[str, dict[str, Any]]:
        wanted = {**msgspec.structs.asdict(request.sampling), "seed": seed, "num_predict": request.max_tokens or -1}
        options: dict[str, Any] = {name: value for name, value in wanted.items() if name not in request.unset}
        if request.stop:
            options["stop"] = list(request.stop)
        # Otherwise it leaves out the oldest messages without a word.
        content: dict[str, Any] = {"model": model, "stream": True, "truncate": False, "shift": False}
        content["options"] = options
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
        if status.code != 400 or _TOO_LONG.search(status.message) is None:
            return None
        n_ctx = next((model.n_ctx for model in self.models if model.loaded and model.n_ctx), 0)
        return (n_ctx + 1, n_ctx) if n_ctx else None  # it reports neither

    def message(self, message: Message) -> dict[str, Any]:
        found = super().message(message)
        return {**found, "thinking": message.reasoning} if message.reasoning else found

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
            numbers = Numbers(data)
            # The first token comes from the prompt, whose time this includes. `prompt_eval_count` holds reused tokens,
            # too (numPromptInputs in its runner), so there is no rate.
            chunk.reported = Reported(
                prompt_total=numbers.count("prompt_eval_count"),
                prompt_ms=numbers.ms("prompt_eval_duration", _NS),
                predicted_n=numbers.count("eval_count"),
                predicted_ms=numbers.ms("eval_duration", _NS),
                load_ms=numbers.ms("load_duration", _NS),
            )
            chunk.lies = numbers.lies
        return chunk


async def fetch_models(connection: Connection) -> tuple[ListedModel, ...]:
    """Return the models on the server, with the context of those that are loaded.

    Raises:
        Status, httpx.HTTPError, ServerError: as a connection does.
    """
    contexts: dict[str, int] = {}
    with contextlib.suppress(Status, httpx.HTTPError, CpuchatError):
        for entry in listed(await connection.get("/api/ps"), "models"):
            contexts[name_of(entry, "name")] = Numbers(entry).count("context_length") or 0
    found = []
    for entry in listed(await connection.get("/api/tags"), "models"):
        details = entry.get("details")
        details = details if isinstance(details, dict) else {}
        if name := name_of(entry, "name"):
            found.append(
                ListedModel(
                    name,
                    quantization=valid_text(details.get("quantization_level"))[:20],
                    size=Numbers(entry).count("size") or 0,
                    architecture=valid_text(details.get("family"))[:40],
                    n_ctx=contexts.get(name, 0),
                    loaded=name in contexts,
                )
            )
    return tuple(found)
