"""OpenAI-compatible servers: what each kind takes and reports beyond OpenAI's interface, and which kind answers.

Sources: tools/server of llama.cpp (README.md; `result_prompt_progress`), the REST API v0 of LM Studio, Ollama's
docs/openai.md, vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from cpuchat.backend.remote.connection import ServerConnection, Status
from cpuchat.backend.remote.stream import Chunk, decoded, error_words, number_at, valid_text, value_at
from cpuchat.base.errors import CpuchatError, ServerError
from cpuchat.base.text import clean_line
from cpuchat.config.servers import ServerModel, host
from cpuchat.models.file_names import quantization_of
from cpuchat.protocol.messages import Generate, Message, Sampling
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.reasons import DraftsOff

OPTIONS = (*Sampling.__struct_fields__, "reasoning", "reasoning_budget")
"""Options of a request that some servers do not take."""
_OPENAI = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"})
FIGURES: Final[dict[str, tuple[str, ...]]] = {
    "prompt_total": ("usage.prompt_tokens",),
    "predicted_n": ("timings.predicted_n", "usage.completion_tokens"),
    "cache_n": ("timings.cache_n", "prompt_progress.cache", "usage.prompt_tokens_details.cached_tokens"),
    "prompt_n": ("timings.prompt_n",),
    "prompt_ms": ("timings.prompt_ms",),
    "predicted_ms": ("timings.predicted_ms", "metrics.generation_time_ms"),
    "ttft_ms": ("metrics.time_to_first_token_ms",),
    "queue_ms": ("timings.queue_ms", "metrics.queue_time_ms"),
    "draft_n": (
        "timings.draft_n", "metrics.speculative_decoding.num_draft_tokens", "stats.total_draft_tokens_count",
    ),
    "draft_n_accepted": (
        "timings.draft_n_accepted", "metrics.speculative_decoding.num_accepted_draft_tokens",
        "stats.accepted_draft_tokens_count",
    ),
    "processed": ("prompt_progress.processed",),
    "total": ("prompt_progress.total",),
}  # fmt: skip
"""Where a part of an answer has a figure: `timings`, `prompt_progress` of llama-server, `metrics` of vLLM, `stats` of
LM Studio, `usage` of all. Of `prompt_total` tokens of the prompt `cache_n` were reused and `prompt_n` evaluated;
`predicted_n` tokens were written so far, `predicted_ms` since the first; `processed` of `total` tokens of the prompt
are done."""
_PLAIN = dict.fromkeys(("prefill_tok_s", "prefill_cached", "acceptance", "n_ctx"), "not reported") | {
    "tokens": "reported at the end of the answer"
}


class ServerKind(NamedTuple):
    """What one kind of server takes and reports beyond the rest. `takes`: the options of a request that it gets;
    `sends`: what every request has. `grammar`: the field for a grammar; "" = it gets the JSON schema. `continuing`:
    what a request has that goes on with its last message; None: it cannot. `is_engine`: it renders the chat template as
    it is told, and takes `ignore_eos`. `reasoning_field`: of a message, for the reasoning of earlier answers; "" =
    none. `lists`: more lists of its models: path, key, and where the fields of `ListedModel` are. `unreported`:
    figures, and why."""

    name: str
    takes: frozenset[str] = _OPENAI
    sends: Mapping[str, Any] = {}
    grammar: str = ""
    continuing: Mapping[str, Any] | None = None
    is_engine: bool = False
    reasoning_field: str = ""
    lists: tuple[tuple[str, str, Mapping[str, str]], ...] = ()
    unreported: Mapping[str, str] = _PLAIN


OTHER: Final = ServerKind("OpenAI-compatible server")
OLLAMA: Final = ServerKind(
    "Ollama",
    takes=_OPENAI | {"reasoning"},
    reasoning_field="reasoning",
    lists=(
        ("/api/tags", "models", {
            "quantization": "details.quantization_level", "size": "size", "architecture": "details.family",
        }),
        ("/api/ps", "models", {"n_ctx": "context_length"}),
    ),
    unreported=_PLAIN | {"n_ctx": "known once the model is loaded"},
)  # fmt: skip
_LLAMA_SERVER: Final = ServerKind(
    "llama-server",
    takes=frozenset(OPTIONS),
    sends=dict.fromkeys(("cache_prompt", "timings_per_token", "return_progress"), True),
    grammar="grammar",
    continuing={},
    is_engine=True,
    reasoning_field="reasoning_content",
    unreported={
        "n_ctx": "known once the model is loaded",
        "acceptance": "no drafts yet: start it with --spec-default or --spec-draft-model",
    },
)
KINDS: Final = {
    "llamacpp": _LLAMA_SERVER,
    "cpuchat": _LLAMA_SERVER._replace(
        name="cpuchat serve",
        sends=dict.fromkeys(("timings_per_token", "return_progress"), True),
        continuing=None,
        unreported={"acceptance": "no drafts yet"},
    ),
    "vllm": ServerKind(
        "vLLM",
        takes=_OPENAI | {"top_k", "min_p", "repeat_penalty", "reasoning"},
        sends={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        grammar="structured_outputs",
        continuing={"continue_final_message": True, "add_generation_prompt": False},
        is_engine=True,
        # Without the tokens that its prefix cache had, which the second option reports, a prefill rate means nothing.
        unreported=dict.fromkeys(
            ("prefill_tok_s", "prefill_cached"),
            "start vLLM with --enable-per-request-metrics --enable-prompt-tokens-details",
        ) | {
            "n_ctx": "not reported",
            "acceptance": "start vLLM with --speculative-config, --per-request-spec-decode-metrics summary",
        },
    ),
    "organization_owner": ServerKind(
        "LM Studio",
        takes=_OPENAI | {"top_k", "min_p", "repeat_penalty"},
        lists=(("/api/v0/models", "data", {
            "quantization": "quantization", "architecture": "arch", "n_ctx": "loaded_context_length",
            "n_ctx_train": "max_context_length",
        }),),
        unreported=_PLAIN | {"acceptance": "only for draft models of LM Studio"},
    ),
}  # fmt: skip
"""By the owner of its models."""


@dataclass(frozen=True)
class ListedModel:
    """A model that a server offers. Sizes in bytes and tokens, 0 = unknown. `loaded` None: unknown."""

    name: str
    quantization: str = ""
    size: int = 0
    n_params: int = 0
    n_ctx: int = 0
    n_ctx_train: int = 0
    n_vocab: int = 0
    architecture: str = ""
    loaded: bool | None = None


_LONGEST_NAME, _LONGEST_WORD, _MAX_MODELS = 300, 40, 2_000
_META = {name: f"meta.{name}" for name in ("size", "n_params", "n_ctx", "n_ctx_train", "n_vocab")}
_FIELDS = {**_META, "quantization": "meta.ftype"}  # of llama-server in `/v1/models`
_SEED_LIMIT = 0xFFFFFFFF  # llama.cpp draws a seed of its own for this one
_OVER_CONTEXT = "exceed_context_size_error"
_NEEDED = (
    r"(\d{1,9}) (?:in the messages|in the prompt|input tokens)|prompt contains (?:at least )?(\d{1,9})"
    r"|requested (\d{1,9}) tokens(?! \()"
)


def context_sizes(status: Status) -> tuple[int, int, bool] | None:
    """Return the tokens of a prompt and of the context when a server rejects the prompt as too long, and whether it
    counts Max tokens too, so that the prompt may fit alone; else None."""
    if status.error.get("type") == _OVER_CONTEXT:
        needed, n_ctx = (int(number_at(status.error, name) or 0) for name in ("n_prompt_tokens", "n_ctx"))
        return (needed, n_ctx, False) if needed and n_ctx else None
    if (limit := re.search(r"maximum context length is (\d{1,9}) tokens", status.message)) is None:
        return None
    n_ctx, found = int(limit[1]), re.search(_NEEDED, status.message)
    counts_output = re.search(r"output tokens|in the completion|max_(?:completion_)?tokens", status.message) is not None
    return int(next(filter(None, found.groups()))) if found is not None else n_ctx + 1, n_ctx, counts_output


class Adapter:
    """Speaks to one server of a kind. `models` are those that it lists."""

    def __init__(self, connection: ServerConnection, kind: ServerKind, models: tuple[ListedModel, ...] = ()) -> None:
        self.connection, self.kind, self.models, self.place = connection, kind, models, host(connection.server)
        self._rejected: set[str] = set()
        self._told = False  # that tools are ignored

    def describe(self, name: str) -> ModelInfo:
        """Return the model of that name; "" is the loaded one, or the first. Raises ServerError: there is none."""
        models = self.models or ((ListedModel(name),) if name else ())  # a server that lists none
        if not models:
            raise ServerError(f"{self.place} lists no models.", "Name one: --model NAME.")
        model = next((one for one in models if (one.name == name if name else one.loaded)), models[0])
        if name and model.name != name:
            known = ", ".join(one.name for one in models[:5])
            raise ServerError(f"{self.place} has no model {clean_line(name)!r}.", f"It has {clean_line(known)}.")
        source = ServerModel(self.connection.server, model.name)
        warning = f"The API key goes to {self.place} unencrypted: use https."
        unreported = {name: why for name, why in self.kind.unreported.items() if name != "n_ctx" or not model.n_ctx}
        listed: dict[str, Any] = {name: getattr(model, name) for name in ("architecture", *_META)}
        return ModelInfo(
            path=str(source), name=source.stem, quantization=model.quantization or quantization_of(model.name),
            **listed, n_layer=0, n_threads=0, notes=(warning,) if self.connection.leaks_key else (),
            server=f"{self.kind.name} at {self.place}", unreported=tuple(unreported.items()), ignored=self.ignored,
            drafts_off=DraftsOff("model", note=why) if (why := unreported.get("acceptance", "")) else None,
        )  # fmt: skip

    def request(self, request: Generate, model: str, seed: int) -> tuple[str, dict[str, Any]]:
        """Return the route and the content of a request."""
        kind, options = self.kind, {**msgspec.structs.asdict(request.sampling), "seed": seed % _SEED_LIMIT}
        content: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        content |= kind.sends
        if request.json_schema:
            form = {"name": "answer", "schema": json.loads(request.json_schema), "strict": True}
            content["response_format"] = {"type": "json_schema", "json_schema": form}
        elif request.grammar and kind.grammar:
            is_inside = kind.grammar != "grammar"  # vLLM has it in an object of several forms
            content[kind.grammar] = {"grammar": request.grammar} if is_inside else request.grammar
        wanted = request.reasoning
        if request.reasoning_budget is not None and "reasoning_budget" in kind.takes:
            content["reasoning_budget_tokens"] = request.reasoning_budget
        if wanted is not None and kind.is_engine and request.prompt is None:
            effort = {"reasoning_effort": request.effort} if request.effort else {}
            content["chat_template_kwargs"] = {**dict.fromkeys(("enable_thinking", "thinking"), wanted), **effort}
        elif wanted is not None and "reasoning" in kind.takes:
            content["reasoning_effort"] = (request.effort or "medium") if wanted else "none"
        for name in kind.takes.intersection(options).difference(request.unset):
            if options[name] or name not in ("presence_penalty", "frequency_penalty"):  # some servers have none
                content[name] = options[name]
        if kind.name == "vLLM" and "repeat_penalty" in content:
            content["repetition_penalty"] = content.pop("repeat_penalty")
        more = {
            "max_completion_tokens" if "max_tokens" in self._rejected else "max_tokens": request.max_tokens,
            "stop": request.stop,
            "tools": [tool.declaration() for tool in request.tools],
            "ignore_eos": request.ignore_eos and kind.is_engine,
        }
        content |= {name: value for name, value in more.items() if value}
        content |= kind.continuing or {} if request.continues else {}
        content = {name: value for name, value in content.items() if name not in self._rejected}
        if request.prompt is not None:
            return "/v1/completions", {**content, "prompt": request.prompt}
        return "/v1/chat/completions", {**content, "messages": [self._message(one) for one in request.messages]}

    def _message(self, message: Message) -> dict[str, Any]:
        found: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning and self.kind.reasoning_field:
            found[self.kind.reasoning_field] = message.reasoning
        if message.role == "tool":
            return found | {"tool_call_id": message.call_id, "name": message.tool}
        calls = [call.declaration(as_text=True) for call in message.calls]
        return found | ({"tool_calls": calls} if calls else {})

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the options of a request that the server does not get: it has none of them, or has rejected them."""
        return tuple(name for name in OPTIONS if name not in self.kind.takes or name in self._rejected)

    def missed(self, request: Generate) -> list[str]:
        """Return those of them that the user has set, the window of penalties only with one."""
        values, default = ({**msgspec.structs.asdict(one), **msgspec.structs.asdict(one.sampling)}
                           for one in (request, Generate()))  # fmt: skip
        penalties = ("repeat_penalty", "presence_penalty", "frequency_penalty")
        if all(values[name] == default[name] for name in penalties):
            values["repeat_last_n"] = default["repeat_last_n"]
        return [name for name in self.ignored if values[name] != default[name]]

    def ignores_tools(self, request: Generate, prompt_tokens: int) -> bool:
        """Return, once, whether the tokens that the server reports of a prompt (0: none) are too few for its tools:
        each word of names and descriptions is at least one, and every template that knows tools has them."""
        words = " ".join([*(f"{tool.name} {tool.description}" for tool in request.tools), request.messages[-1].content])
        is_new = not self._told and 0 < prompt_tokens < len(words.split())
        self._told = self._told or is_new
        return is_new

    def without_rejected(self, status: Status) -> bool:
        """Leave out from now on the option that the server rejected; False when it names none that can be left out."""
        if status.code not in (400, 422):
            return False
        named = str(status.error.get("param") or "")
        optional = ("max_tokens", "temperature", "top_p", "seed", "stream_options", "presence_penalty")
        found = [name for name in optional if name not in self._rejected and (named == name or name in status.message)]
        self._rejected |= set(found[:1])
        return bool(found)

    def chunk(self, data: dict[str, Any]) -> Chunk:
        """Return what one object of the stream reports. Raises ServerError: the server reports that it failed."""
        choices = data.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        failed = data.get("error") or value_at(choice, "error") or data.get("detail")
        if isinstance(failed, dict) and failed.get("type") == _OVER_CONTEXT:  # known behind the queue
            raise Status(400, failed, None)
        if failed or "error" in (data.get("object"), data.get("type"), value_at(choice, "finish_reason")):
            words = clean_line(error_words(failed or data) or "no reason given")[:_LONGEST_NAME]
            raise ServerError(f"{self.place} failed: {words}.", "Check the server's log.")
        chunk = Chunk(finish=valid_text(value_at(choice, "finish_reason")))
        delta = value_at(choice, "delta")  # beside it, a message at the end is the whole text again
        if delta is None and choice:
            delta = value_at(choice, "message") or {"content": value_at(choice, "text")}
        if isinstance(delta, dict):
            content = delta.get("content")
            chunk.content = valid_text(content) + valid_text(delta.get("refusal"))
            chunk.reasoning = valid_text(delta.get("reasoning_content")) or valid_text(delta.get("reasoning"))
            if isinstance(content, list):
                chunk.reasoning += valid_text(content, "thinking")
            chunk.calls = delta.get("tool_calls") or [{"function": delta.get("function_call")}]
        if data.get("timings"):  # `usage` counts the same, but without what was reused
            data = {**data, "usage": None}
        for name, paths in FIGURES.items():
            values = [value for path in paths if (value := number_at(data, path)) is not None]
            if values and (values[0] or name != "predicted_n"):
                chunk.figures[name] = values[0]
        if {"ttft_ms", "queue_ms"} <= set(chunk.figures):
            chunk.figures["prompt_ms"] = max(0.0, chunk.figures["ttft_ms"] - chunk.figures["queue_ms"])
        return chunk


async def identify(connection: ServerConnection) -> Adapter:
    """Return the adapter for the server, with its models. `owned_by` in the list of models names most servers; Ollama,
    which names the owner of each model's repository, is asked for what only it has. Raises Status, httpx.HTTPError: it
    is not reached, or refuses; ServerError: it is not an inference server."""
    try:
        body = await connection.get("/v1/models")
    except Status as status:
        if status.code != 404 or not connection.server.count("/") > 2:
            raise
        body = await connection.get("/models")  # the address is already that of the OpenAI routes
        connection.root = connection.server
    listing = decoded(b'{"data": %b}' % body if body.lstrip().startswith(b"[") else body)  # Together's is a list alone
    listing = {**listing, "data": listing.get("data") or listing.get("models")}
    if not isinstance(listing["data"], list) and listing.get("object") != "list":
        problem = f"{host(connection.server)} is not an OpenAI-compatible server."
        raise ServerError(problem, "Check the address and the port.")
    owners = {str(entry.get("owned_by")) for entry in _entries(listing, "data")}
    kind = next((kind for owner, kind in KINDS.items() if owner in owners), None)
    if kind is None and "openai" not in owners and "models" in await _object(connection, "/api/tags"):
        kind = OLLAMA
    kind, models = kind or OTHER, dict[str, ListedModel]()
    lists = [(_entries(await _object(connection, path), key), fields) for path, key, fields in kind.lists]
    if not any(entries for entries, _ in lists):
        fields = _FIELDS | ({"n_ctx": "max_model_len"} if kind.name == "vLLM" else {})
        lists = [(_entries(listing, "data"), fields)]
    for entries, fields in lists:
        for entry in entries:
            name = valid_text(entry.get("id")) or valid_text(entry.get("name"))
            if name and len(name) <= _LONGEST_NAME and name.isprintable() and entry.get("type") != "embeddings":
                models[name] = _with_entry(models.get(name, ListedModel(name)), entry, fields, kind)
    if kind.is_engine and len(models) == 1 and not (model := next(iter(models.values()))).n_ctx:
        n_ctx = number_at(await _object(connection, "/props"), "default_generation_settings.n_ctx")
        models[model.name] = replace(model, n_ctx=int(n_ctx or 0))
    return Adapter(connection, kind, tuple(models.values()))


def _with_entry(model: ListedModel, entry: dict[str, Any], fields: Mapping[str, str], kind: ServerKind) -> ListedModel:
    """Return a model with what an entry of a list has in `fields`."""
    values: dict[str, Any] = {name: int(number_at(entry, path) or 0) for name, path in fields.items()}
    for name in {"quantization", "architecture"} & set(fields):
        word, _, size = valid_text(value_at(entry, fields[name]))[:_LONGEST_WORD].partition(" - ")
        values[name] = f"{word}_{size[0]}" if size else word.partition(" ")[0]  # "Q4_K - Medium" of llama.cpp
    found = replace(model, **values)
    state = value_at(entry, "state") or value_at(entry, "status.value")
    is_loaded = state == "loaded" if state else kind.is_engine or bool(found.n_ctx) or None
    return replace(found, loaded=is_loaded)


def _entries(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = data.get(key)
    entries = found[:_MAX_MODELS] if isinstance(found, list) else []
    return [one if isinstance(one, dict) else {"id": one} for one in entries]


async def _object(connection: ServerConnection, path: str) -> dict[str, Any]:
    try:
        return decoded(await connection.get(path))
    except (Status, httpx.HTTPError, CpuchatError):
        return {}
