"""The dialect of OpenAI-compatible servers that report nothing beyond it; base of those that do.

They report the model's name and, at the end of an answer, the tokens (`usage`). `Metrics` reads the text format of
Prometheus, in which some report more.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import httpx
import msgspec

from cpuchat.backend.remote.connection import Connection, Status
from cpuchat.backend.remote.stream import Chunk, Numbers, error_words, valid_text, with_calls
from cpuchat.base.errors import CpuchatError, ServerError
from cpuchat.base.text import clean_line
from cpuchat.config.servers import ServerModel, host
from cpuchat.models.file_names import quantization_of
from cpuchat.protocol.messages import Generate, Message, Sampling, ServerLoad
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import SpeculationFigures

_LONGEST_NAME = 300
_MOST_MODELS = 2_000
_WORDS, _LONGEST_WORD = frozenset({"quantization", "architecture"}), 40
FAILURES = (Status, httpx.HTTPError, CpuchatError)
"""What a request to a server raises."""
OPTIONS = (*Sampling.__struct_fields__, "reasoning", "reasoning_budget")
"""Options of a request that some servers do not take."""
_PENALTIES = ("presence_penalty", "frequency_penalty")  # some servers have none: left out where they are off
_DEFAULT = Generate()


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


_NOT, _AT_END, _ONCE_LOADED = "not reported", "reported at the end of the answer", "known once the model is loaded"
_VLLM = "start vLLM with --enable-per-request-metrics --enable-prompt-tokens-details"
_UNREPORTED: Final[dict[str, dict[str, str]]] = {
    "": {
        "tokens": _AT_END, "prefill_tok_s": _NOT, "prefill_cached": _NOT, "queue_s": _NOT,
        "acceptance": "not reported by this server", "n_ctx": _NOT,
    },
    "llama-server": {
        "kv_used": "not reported by llama-server", "running": "start llama-server with --metrics",
        "acceptance": "speculation is off: start it with --spec-default or --spec-draft-model", "n_ctx": _ONCE_LOADED,
    },
    "cpuchat serve": {
        "kv_used": "not reported by cpuchat serve", "running": "start llama-server with --metrics",
        "acceptance": "speculation is off: start it with --drafters auto", "n_ctx": _ONCE_LOADED,
    },
    "LM Studio": {
        "tokens": _AT_END, "prefill_tok_s": _NOT, "prefill_cached": _NOT, "queue_s": _NOT, "running": _NOT,
        "acceptance": "only for draft models of LM Studio", "n_ctx": _NOT,
    },
    "Ollama": {
        "tokens": _AT_END, "prefill_tok_s": "reused tokens not reported", "prefill_cached": _NOT, "running": _NOT,
        "acceptance": "not reported by Ollama", "n_ctx": _ONCE_LOADED,
    },
    # Without the tokens that its prefix cache had, which the second option reports, a prefill rate means nothing.
    "vLLM": {
        "prefill_tok_s": _VLLM, "prefill_cached": _VLLM, "queue_s": _VLLM, "running": "its /metrics cannot be read",
        "own_acceptance": "start vLLM with --per-request-spec-decode-metrics summary",
        "acceptance": "speculation is off: start it with --speculative-config", "n_ctx": _NOT,
    },
}  # fmt: skip
"""By the kind of a server: the figures that it does not report, and why, or how to get them."""
_FEATURES: Final = {"running": "metrics", "acceptance": "drafts", "own_acceptance": "no drafts", "n_ctx": "n_ctx"}
"""The features of a server or a model with which these figures are reported after all."""


class Adapter:
    """Speaks to one server, and to one whose kind is not known.

    Attributes:
        kind: what the server calls itself.
        by_line: it streams one object per line.
        counts_beside: its speculation figures are read beside the answer, and once more at its end.
        continues: it goes on with an answer at the end of the messages.
        takes_grammars: its answers match the grammar of a request, others get its JSON schema.
        takes: the options of a request that it gets; `names`: what it calls those whose name is another one.
        constants: what every request has.
        reasoning_field: of a message, for the reasoning of earlier answers; "" = it takes none.
        arguments_as_text: arguments of calls of tools are JSON in a string.
        figures: by the path of an object in a part of an answer, what it calls the fields of `Reported`.
        has: features (`_FEATURES`).
    """

    kind = "OpenAI-compatible server"
    by_line = False
    counts_beside = False
    takes_grammars = continues = False
    arguments_as_text = True
    reasoning_field = ""
    takes = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"})
    names: ClassVar[Mapping[str, str]] = {}
    constants: ClassVar[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
    figures: ClassVar[dict[str, dict[str, str]]] = {
        "usage": {"prompt_total": "prompt_tokens", "predicted_n": "completion_tokens"},
        "usage.prompt_tokens_details": {"cache_n": "cached_tokens"},
    }

    def __init__(self, connection: Connection, models: tuple[ListedModel, ...] = ()) -> None:
        self.connection = connection
        self.models = models
        self.has: set[str] = set()
        self._rejected: set[str] = set()
        self._told = False  # that tools are ignored

    async def describe(self, name: str) -> ModelInfo:
        """Return a model of the server; "" is the one that is loaded, or the first one. Raises ServerError: it has no
        such model; Status, httpx.HTTPError: as a connection does.
        """
        return self._info(self.choose(name))

    def choose(self, name: str) -> ListedModel:
        """Return the model of that name. Raises ServerError as `describe`."""
        for model in self.models:
            if model.name == name:
                return model
        if name and self.models:
            known = ", ".join(model.name for model in self.models[:5])
            raise ServerError(f"{self.place} has no model {clean_line(name)!r}.", f"It has {clean_line(known)}.")
        if name:  # a server that lists none
            return ListedModel(name)
        if not self.models:
            raise ServerError(f"{self.place} lists no models.", "Name one: --model NAME.")
        return next((model for model in self.models if model.loaded), self.models[0])

    @property
    def place(self) -> str:
        """Return host and port for messages."""
        return host(self.connection.server)

    def _info(self, model: ListedModel) -> ModelInfo:
        source = ServerModel(self.connection.server, model.name)
        has = self.has | ({"n_ctx"} if model.n_ctx else set()) | (set() if "drafts" in self.has else {"no drafts"})
        reasons = _UNREPORTED.get(self.kind, _UNREPORTED[""]).items()
        unreported = tuple((figure, why) for figure, why in reasons if _FEATURES.get(figure) not in has)
        return ModelInfo(
            path=str(source),
            name=source.stem,
            architecture=model.architecture,
            quantization=model.quantization or quantization_of(model.name),
            n_params=model.n_params,
            size=model.size,
            n_ctx=model.n_ctx,
            n_ctx_train=model.n_ctx_train,
            n_vocab=model.n_vocab,
            n_layer=0,
            n_threads=0,
            notes=self._notes(),
            server=f"{self.kind} at {self.place}",
            unreported=unreported,
            ignored=self.ignored,
            no_speculation=dict(unreported).get("acceptance", ""),
        )

    def _notes(self) -> tuple[str, ...]:
        connection = self.connection
        if connection.has_key and connection.is_open:
            return (f"The API key goes to {self.place} unencrypted: use https.",)
        return ()

    # Requests

    def begin(self, request: Generate) -> None:
        """Prepare for another answer, before the first attempt."""

    def request(self, request: Generate, model: str, seed: int) -> tuple[str, dict[str, Any]]:
        """Return the route and the content of a request."""
        content: dict[str, Any] = {"model": model, **self.constants}
        for name, value in {**msgspec.structs.asdict(request.sampling), "seed": seed}.items():
            if name in self.takes and (value or name not in _PENALTIES):
                content[self.names.get(name, name)] = value
        if request.max_tokens:
            content["max_tokens"] = request.max_tokens
        if request.stop:
            content["stop"] = list(request.stop)
        if request.json_schema and not self.takes_grammars:
            form = {"name": "answer", "schema": json.loads(request.json_schema), "strict": True}
            content["response_format"] = {"type": "json_schema", "json_schema": form}
        if request.tools:
            content["tools"] = [tool.declaration() for tool in request.tools]
        self.extend(content, request)
        for name in request.unset:
            content.pop(self.names.get(name, name), None)
        for name in self._rejected & set(content):
            value = content.pop(name)
            if name == "max_tokens":
                content["max_completion_tokens"] = value
        if request.prompt is not None:
            return "/v1/completions", {**content, "prompt": request.prompt}
        return "/v1/chat/completions", {**content, "messages": [self.message(one) for one in request.messages]}

    def extend(self, content: dict[str, Any], request: Generate) -> None:
        """Add what only this kind of server takes."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the options of a request that the server does not get: it has none of them, or has rejected them."""
        return tuple(name for name in OPTIONS if name not in self.takes or name in self._rejected)

    def missed(self, request: Generate) -> list[str]:
        """Return those of them that the user has set."""
        return [name for name in self.ignored if _option(request, name) != _option(_DEFAULT, name)]

    def ignores_tools(self, request: Generate, prompt_tokens: int) -> bool:
        """Return, once, whether the tokens that the server reports of a prompt (0: none) are too few for its tools.

        Words of names and descriptions are at least a token each, and every template that knows tools has them.
        """
        told = " ".join(f"{tool.name} {tool.description}" for tool in request.tools)
        last = request.messages[-1].content if request.messages else ""
        if self._told or not 0 < prompt_tokens < len(f"{told} {last}".split()):
            return False
        self._told = True
        return True

    def message(self, message: Message) -> dict[str, Any]:
        found: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning and self.reasoning_field:
            found[self.reasoning_field] = message.reasoning
        return with_calls(found, message, as_text=self.arguments_as_text)

    def without_rejected(self, status: Status) -> bool:
        """Leave out from now on the option that the server rejected; False when it names none that can be left out."""
        if status.code not in (400, 422):
            return False
        named = str(status.error.get("param") or "")
        optional = ("max_tokens", "temperature", "top_p", "seed", "stream_options", "presence_penalty")
        found = [name for name in optional if name not in self._rejected and (named == name or name in status.message)]
        self._rejected |= set(found[:1])
        return bool(found)

    def context_sizes(self, status: Status) -> tuple[int, int] | None:
        """Return (tokens of the prompt, context) when the server rejects a prompt as too long; else None."""
        return None

    def counts_output(self, status: Status) -> bool:
        """Return whether a prompt was rejected together with Max tokens: it may fit alone."""
        return False

    # Answers

    def chunk(self, data: dict[str, Any]) -> Chunk:
        """Return what one object of the stream reports. Raises ServerError: the server reports that it failed."""
        choices = data.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        failed = data.get("error") or value_at(choice, "error") or data.get("detail")
        if failed or "error" in (data.get("object"), data.get("type"), value_at(choice, "finish_reason")):
            raise self.failure(failed or data)
        chunk = Chunk(id=valid_text(data.get("id")))
        if isinstance(choice, dict):
            delta = choice.get("delta")  # beside it, a message at the end is the whole text again
            delta = choice.get("message") or {"content": choice.get("text")} if delta is None else delta
            if isinstance(delta, dict):
                content, call = delta.get("content"), delta.get("function_call")
                chunk.content = valid_text(content) + valid_text(delta.get("refusal"))
                chunk.reasoning = valid_text(delta.get("reasoning_content")) or valid_text(delta.get("reasoning"))
                if isinstance(content, list):
                    chunk.reasoning += valid_text(content, "thinking")
                chunk.calls = delta.get("tool_calls") or [{"function": call}]
            chunk.finish = valid_text(choice.get("finish_reason"))
        for path, names in self.figures.items():
            chunk.report(value_at(data, path), names)
        return chunk

    def failure(self, error: Any) -> ServerError:
        """Return the error that a server reports in the middle of an answer."""
        words = clean_line(error_words(error) or "no reason given")[:_LONGEST_NAME]
        return ServerError(f"{self.place} failed: {words}.", "Check the server's log.")

    # Beside an answer

    async def load(self, request_id: int) -> ServerLoad | None:
        """Return the load of the server while it answers; None when it reports none."""
        return None

    def speculation(self, predicted_n: int) -> SpeculationFigures | None:
        """Return the speculation figures since the answer began, where the server reports them beside it."""
        return None

    async def is_idle(self, seed: int) -> bool | None:
        """Return whether the server has stopped the answer with that seed; None when that is not known."""
        return None

    async def end_reasoning(self, answer_id: str) -> bool:
        """Ask the server to end the reasoning and to answer now; False when it cannot."""
        return False


def _option(request: Generate, name: str) -> Any:
    sampling = request.sampling
    if (
        name == "repeat_last_n"
        and sampling.repeat_penalty == 1
        and not (sampling.presence_penalty or sampling.frequency_penalty)
    ):
        return _DEFAULT.sampling.repeat_last_n  # the window of no penalty
    return getattr(sampling if name in Sampling.__struct_fields__ else request, name)


def extend_engine(content: dict[str, Any], request: Generate) -> None:
    """Add what servers take that are little more than the engine: they render the chat template as they are told."""
    if request.ignore_eos:
        content["ignore_eos"] = True
    if request.reasoning is not None and request.prompt is None:
        effort = {"reasoning_effort": request.effort} if request.effort else {}
        choice = dict.fromkeys(("enable_thinking", "thinking"), request.reasoning)
        content["chat_template_kwargs"] = {**choice, **effort}


def value_at(data: Any, path: str) -> Any:
    """Return the value at a path of names, "meta.size"; None where there is none."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


def models_in(
    data: dict[str, Any], key: str = "data", name: str = "id", **paths: str
) -> Iterator[tuple[dict[str, Any], ListedModel]]:
    """Yield the entries of a list that have a name, each as a model: `paths` tell where its fields are."""
    for entry in listed(data, key):
        if shown := name_of(entry, name):
            values: dict[str, Any] = {field: value_at(entry, path) for field, path in paths.items()}
            numbers = Numbers(values)
            for field, value in values.items():
                values[field] = valid_text(value)[:_LONGEST_WORD] if field in _WORDS else numbers.count(field) or 0
            yield entry, ListedModel(shown, **values)


def listed(data: dict[str, Any], key: str = "data") -> list[dict[str, Any]]:
    """Return the entries of a list of models, as `/v1/models` has it."""
    found = data.get(key)
    entries = found[:_MOST_MODELS] if isinstance(found, list) else []
    return [one if isinstance(one, dict) else {"id": one} for one in entries]


def name_of(entry: dict[str, Any], key: str = "id") -> str:
    """Return the name of a model in a list, on one line; "" when there is none that can be shown."""
    name = valid_text(entry.get(key)) or valid_text(entry.get("name"))
    return name if name and len(name) <= _LONGEST_NAME and name.isprintable() else ""


_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:^|,)position="(\d{1,3})"')
_MOST_POSITIONS = 64


@dataclass(frozen=True)
class Metrics:
    """Samples by name, those of several labels (such as the engines of one server) added up, and how many these were;
    `by_position` for those with a `position`."""

    values: Mapping[str, float] = field(default_factory=dict)
    by_position: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    series: Mapping[str, int] = field(default_factory=dict)

    def count(self, name: str) -> int | None:
        """Return a counter or gauge as a whole number; None when there is none."""
        value = self.values.get(name)
        return None if value is None else int(value)

    def mean(self, name: str) -> float | None:
        """Return a gauge that is a share, on average over its labels; None when there is none."""
        value = self.values.get(name)
        return None if value is None else value / self.series[name]

    def since(self, before: Metrics, name: str) -> float | None:
        """Return what a counter has grown by; None when it is not there, or was reset by a restart."""
        now, then = self.values.get(name), before.values.get(name)
        return None if now is None or then is None or now < then else now - then

    def positions_since(self, before: Metrics, name: str) -> tuple[int, ...]:
        """Return the same for each position."""
        now, then = self.by_position.get(name, ()), before.by_position.get(name, ())
        then = (*then, *(0.0,) * (len(now) - len(then)))
        return tuple(max(0, int(a - b)) for a, b in zip(now, then, strict=False))


async def read_metrics(connection: Connection) -> Metrics:
    """Return the metrics of a server now. Raises as a connection does."""
    return parse((await connection.get_bytes("/metrics")).decode(errors="replace"))


def parse(text: str) -> Metrics:
    """Parse metrics. Skips what is malformed."""
    values: dict[str, float] = {}
    series: dict[str, int] = {}
    positions: dict[str, dict[int, float]] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if line.startswith("#") or found is None:
            continue
        name, labels = found[1], found[2] or ""
        try:
            value = float(found[3])
        except ValueError:
            continue
        if not math.isfinite(value) or not 0 <= value < 1e18:
            continue
        values[name] = values.get(name, 0.0) + value
        series[name] = series.get(name, 0) + 1
        at = _POSITION.search(labels)
        if at is not None and int(at[1]) < _MOST_POSITIONS:
            by_position = positions.setdefault(name, {})
            by_position[int(at[1])] = by_position.get(int(at[1]), 0.0) + value
    ordered = {name: tuple(at.get(n, 0.0) for n in range(max(at) + 1)) for name, at in positions.items()}
    return Metrics(values, ordered, series)
