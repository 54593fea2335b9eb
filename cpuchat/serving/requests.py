"""One request, whatever dialect it came in: checked, and turned into what the engine understands.

The dialects (`openai_chat`, `responses`, `anthropic`) decode their bodies and say by `Asked` what they ask for.

Fields that are not known are ignored, as compatible servers do: programs send many that change nothing here. What would
change the answer and is not supported is refused, never ignored. `cache_salt` is vLLM's: requests reuse nothing of
those with another one.
"""

from __future__ import annotations

import hashlib
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import UsageError
from cpuchat.base.text import clean_line
from cpuchat.config.settings import SamplingSection, Settings, explained
from cpuchat.grammar.gbnf import LONGEST_FORM, check_grammar
from cpuchat.grammar.schema import schema_grammar
from cpuchat.protocol.messages import ANY_CALL, CallRule, Generate, Message, Sampling, Speculation, Tool, ToolCall
from cpuchat.serving.errors import Refusal

BYTES_PER_TOKEN = 64
"""More text than this for each token of the context cannot fit; it is refused before the engine tokenizes it."""
MOST_STOPS, LONGEST_STOP = 16, 1000
STREAM_SECONDS, WHOLE_SECONDS = 0.08, 1.0
"""Between two events with text: of a stream, and where only the end is sent."""
SHORT_TOKENS, SHORT_BYTES = 64, 8_000
"""A request with so small a limit and so little text is short: it may be answered before a long one of its client."""
MOST_ANSWERS = 8
_MOST_QUOTED = 80
"""Characters of a wrong value that an error repeats."""
_MOST_TOOLS = 512
_DEEPEST = 60
_INT32 = (1 << 31) - 1
_NAME = re.compile(r"[\w.:-]{1,128}")


@dataclass(frozen=True)
class Unsupported:
    """Metadata of a field that is refused, because of `reason`, unless it is left out or has one of these values."""

    reason: str
    neutral: tuple[Any, ...]


class Body(SamplingSection, kw_only=True, forbid_unknown_fields=False):
    """Fields that all dialects share; those of sampling have the bounds of the settings."""

    model: str | None = None
    stream: bool | None = None
    seed: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)] | None = None  # type: ignore[assignment]
    top_k: int | None = None
    cache_salt: str | None = None


@cache
def _unsupported(kind: type[Body]) -> dict[str, Unsupported]:
    """Return the fields of a body that are refused."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {name: one for name, hint in hints for one in get_args(hint) if isinstance(one, Unsupported)}


B = TypeVar("B")
T = TypeVar("T", bound=Body)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for beside its sampling; None: the settings decide. `n` answers, `with_timings` in every
    chunk; of a stream `with_progress` of the prompt, and `with_queue`: its place in the queue.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    continues: bool = False
    tools: tuple[Tool, ...] = ()
    calling: CallRule = ANY_CALL
    max_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    grammar: str = ""
    ignore_eos: bool = False
    reasoning: bool | None = None
    reasoning_budget: int | None = None
    logit_bias: Mapping[str, float] | None = None
    logprobs: int | None = None
    n: int = 1
    with_usage: bool = False
    with_timings: bool = False
    with_progress: bool = False
    with_queue: bool = False


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A request that can be answered, as it was `asked`. `is_short`: a title, for instance."""

    request: Generate
    stream: bool
    asked: Asked
    is_short: bool = False

    def of_client(self, client: str) -> ParsedRequest:
        """Return it as a request of `client`, which reuses nothing of what was evaluated for others."""
        owned = msgspec.structs.replace(self.request, owner=f"{client} {self.request.owner}")
        return replace(self, request=owned)

    def choice(self, index: int) -> Generate:
        """Return the request of one of its answers."""
        sampling = self.request.sampling
        if not index or sampling.seed is None:
            return self.request
        return msgspec.structs.replace(
            self.request, sampling=msgspec.structs.replace(sampling, seed=(sampling.seed + index) % (1 << 63))
        )


class RequestReader:
    """Reads requests for one model.

    Args:
        names: that the model answers to.
        n_ctx: tokens of its context.
        settings: for values that a request does not give.
        speculation: how answers are drafted.
        engine: another engine than the worker, whose name it is; "" for the worker.
    """

    def __init__(
        self, names: Collection[str], n_ctx: int, settings: Settings, speculation: Speculation, engine: str = ""
    ) -> None:
        self._names = names
        self.n_ctx = n_ctx
        self.settings = settings
        self._speculation = speculation
        self._engine = engine

    @property
    def most_body(self) -> int:
        """Return the bytes of a body beyond which its text cannot fit into the context."""
        return 2 * LONGEST_FORM + 2 * BYTES_PER_TOKEN * self.n_ctx

    def body(self, data: bytes, kind: type[T]) -> T:
        """Decode a body. Raises Refusal: it is not valid, of another model, or asks for what is not supported."""
        body = decoded(data, kind)
        if body.model and body.model not in self._names:
            served = ", ".join(f"`{name}`" for name in self._names)
            message = f"The model `{quoted(body.model)}` is not served here. Served: {served}."
            raise Refusal(404, message, "model_not_found", param="model")
        for name, field in _unsupported(type(body)).items():
            if getattr(body, name) not in (None, *field.neutral):
                raise field_error(name, field.reason, "unsupported")
        return body

    def check_number(self, given: Sized, param: str = "messages") -> None:
        """Refuse more messages than can fit: a template writes a token or more for each. Raises Refusal."""
        if len(given) > self.n_ctx:
            raise self._too_long(f"{len(given):,} messages", param)

    def check_length(self, param: str, texts: Iterable[str]) -> int:
        """Refuse what is not valid Unicode, or so long that it cannot fit; returns its bytes."""
        try:
            n_bytes = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError:
            raise Refusal(400, f"`{param}` contains an unpaired surrogate.", param=param) from None
        if n_bytes > BYTES_PER_TOKEN * self.n_ctx:
            raise self._too_long(f"{n_bytes:,} bytes", param)
        return n_bytes

    def _too_long(self, size: str, param: str) -> Refusal:
        message = f"The prompt has {size}, but the context holds only {self.n_ctx:,} tokens."
        return Refusal(400, message, "context_length_exceeded", param=param, more={"n_ctx": self.n_ctx})

    def parsed(self, body: Body, asked: Asked, param: str = "messages") -> ParsedRequest:
        """Return the request. `param` has its text. Raises Refusal."""
        texts = [asked.prompt or "", *(text for one in asked.messages for text in _texts(one))]
        declared = [_encoded(tool.declaration(), "tools") for tool in asked.tools]
        self.check_number(asked.messages, param)
        n_bytes = self.check_length(param, texts) + self.check_length("tools", declared)
        self._check_calling(asked)
        stream, limit = bool(body.stream), self._limit(asked.max_tokens)
        keeps = not body.cache_salt  # a salt is for one session, often
        request = Generate(
            messages=asked.messages,
            prompt=asked.prompt,
            continues=asked.continues,
            tools=asked.tools,
            calling=asked.calling,
            streams_calls=bool(asked.tools),
            sampling=self._sampling(body),
            max_tokens=limit,
            stop=_stops(asked.stop),
            speculation=self._speculation,
            trim=False,
            ignore_eos=asked.ignore_eos,
            grammar=asked.grammar,
            reasoning=asked.reasoning,
            reasoning_budget=self._budget(asked.reasoning_budget),
            frame_seconds=STREAM_SECONDS if stream else WHOLE_SECONDS,
            unsplit=asked.prompt is not None,
            owner=body.cache_salt or "",
            keeps=keeps,
            agent=_agent(asked) if keeps else "",
            logit_bias=_bias(asked.logit_bias),
            logprobs=asked.logprobs,
        )
        return ParsedRequest(
            request=request,
            stream=stream,
            asked=asked,
            is_short=0 < limit <= SHORT_TOKENS and n_bytes <= SHORT_BYTES and asked.n == 1,
        )

    def _check_calling(self, asked: Asked) -> None:
        """Refuse calls in place of an answer in a form of its own, and what only the worker can do."""
        if asked.grammar and asked.calling.mode == "required":
            raise field_error("tool_choice", "an answer in a form of its own calls no tools")
        for param, is_asked in (
            ("tool_choice", asked.calling.mode != "auto" or asked.calling.names),
            ("logprobs", asked.logprobs is not None),
            ("logit_bias", asked.logit_bias),
        ):
            if self._engine and is_asked:
                raise field_error(param, f"not supported while {self._engine} answers (a draft head)", "unsupported")

    def _sampling(self, body: Body) -> Sampling:
        """Return the settings with what the request gives."""
        if body.top_k is not None and body.top_k < -1:
            raise field_error("top_k", "expected `int` >= 0")
        values = msgspec.structs.asdict(self.settings.sampling)
        values |= {name: given for name in values if (given := getattr(body, name)) is not None}
        for name in ("top_k", "repeat_last_n"):
            if values[name] is not None:
                values[name] = max(min(values[name], _INT32), 0)  # -1 is "off" in other servers
        return SamplingSection(**values).sampling()

    def _budget(self, given: int | None) -> int | None:
        """Return `Generate.reasoning_budget`; -1 means "no limit" in llama-server."""
        if given is None:
            return self.settings.chat.request_options()["reasoning_budget"]
        if given < -1:
            raise field_error("reasoning_budget_tokens", f"must be -1 or more, not {given}")
        return None if given == -1 else min(given, self.n_ctx)

    def _limit(self, given: int | None) -> int:
        """Return `Generate.max_tokens`; -1 means "no limit" in llama-server."""
        if given is None:
            return self.settings.chat.max_tokens
        if given == -1:
            return 0
        if given < 1:
            raise Refusal(400, f"`max_tokens` must be at least 1, not {given}.", param="max_tokens")
        return min(given, self.n_ctx)


def _texts(message: Message) -> Iterable[str]:
    yield message.content
    yield message.reasoning
    for call in message.calls:
        yield _encoded(call.arguments, "messages")


def _agent(asked: Asked) -> str:
    """Return the name of what the prompts of an agent begin with: of its tools and system prompt."""
    system = [one.content for one in asked.messages if one.role == "system"]
    if not system and not asked.tools:
        return ""
    declared = [tool.declaration() for tool in asked.tools]
    return hashlib.sha256(msgspec.json.encode([system, declared, asked.reasoning])).hexdigest()


def _bias(given: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    found = []
    for token, value in (given or {}).items():
        if not token.isdecimal() or len(token) > 9 or not -100 <= value <= 100:
            raise field_error("logit_bias", "needs token ids with values from -100 to 100")
        found.append((int(token), float(value)))
    return tuple(found)


def answer_grammar(param: str, schema: Any, grammar: str = "", *, also: str = "") -> str:
    """Return the grammar of answers of this form. Raises Refusal.

    Args:
        param: the field that it is from.
        grammar: GBNF, in place of a schema.
        also: a field of the request that also tells where the answer ends, or what it is.
    """
    if also:
        raise field_error(also, f"`{param}` decides what the answer is, and where it ends")
    if len(grammar or _encoded(schema, param)) > LONGEST_FORM:
        raise field_error(param, f"larger than {LONGEST_FORM:,} bytes", "unsupported")
    try:
        if grammar:
            check_grammar(grammar, param)
            return grammar
        return schema_grammar(schema, param)
    except UsageError as error:
        reason = clean_line(f"{error.message} {error.hint}".strip())[: 5 * _MOST_QUOTED]
        raise Refusal(400, reason, "invalid_grammar", param=param) from None


def read_tools(given: Iterable[Any], declared: Callable[[Any, str], tuple[dict[str, Any], str]]) -> tuple[Tool, ...]:
    """Return the tools that a client declares. `declared` takes one of them with its place, and returns the object that
    describes it, and where that is. Raises Refusal.
    """
    tools: dict[str, Tool] = {}
    for number, one in enumerate(given):
        tool = _tool(*declared(one, f"tools[{number}]"), tools)
        tools[tool.name] = tool
    return tuple(tools.values())


def _tool(given: dict[str, Any], where: str, known: Collection[str]) -> Tool:
    name, about, schema = (
        given.get("name"),
        given.get("description"),
        given.get("parameters", given.get("input_schema")),
    )
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise field_error(f"{where}.name", "must be 1 to 128 letters, digits, `_`, `-`, `.` or `:`")
    if name in known:
        raise field_error(f"{where}.name", f"`{quoted(name)}` is there twice")
    if len(known) >= _MOST_TOOLS:
        raise field_error("tools", f"more than {_MOST_TOOLS} are not supported", "unsupported")
    schema = {"type": "object", "properties": {}} if schema is None else schema
    if not isinstance(schema, dict) or is_deep(schema):
        raise field_error(
            f"{where}.parameters", f"must be a JSON schema of at most {_DEEPEST} levels, with 64-bit integers"
        )
    if strict := bool(given.get("strict")):
        answer_grammar(f"{where}.parameters", schema)
    return Tool(name=name, description=about if isinstance(about, str) else "", parameters=schema, strict=strict)


def read_choice(choice: Any, tools: Sequence[Tool], *, single: bool) -> CallRule:
    """Return what OpenAI's `tool_choice` lets the model call, in the form of chats or of responses. Raises Refusal."""
    match choice:
        case None | "":
            return read_rule("auto", (), tools, single=single)
        case str():
            return read_rule(choice, (), tools, single=single)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return read_rule("required", (name,), tools, single=single)
        case {"type": "allowed_tools"}:
            match choice.get("allowed_tools", choice):
                case {"mode": str(mode), "tools": list(allowed)}:
                    named = (one.get("function", one) for one in allowed if isinstance(one, dict))
                    names = [str(one.get("name")) for one in named if isinstance(one, dict)]
                    return read_rule(mode, names, tools, single=single)
    raise field_error("tool_choice", "must be auto, none, required, or a function by name")


def read_rule(mode: str, names: Sequence[str], tools: Sequence[Tool], *, single: bool) -> CallRule:
    """Return what may be called: `mode` as of `CallRule`, or one tool by name. Raises Refusal."""
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise field_error("tool_choice", f"there is no tool `{quoted(name)}`")
    if mode == "required" and not known:
        raise field_error("tool_choice", "there are no tools")
    if mode == "auto" or mode == "required" or mode == "none":
        return CallRule(mode=mode, names=tuple(dict.fromkeys(names)), single=single)
    raise field_error("tool_choice", f"`{quoted(mode)}` is not supported", "unsupported")


def read_call(id: Any, name: Any, arguments: Any, where: str) -> ToolCall:
    """Return a call of an earlier answer; its arguments may be JSON in a string. Raises Refusal."""
    if not isinstance(id, str) or not id or not isinstance(name, str) or not name:
        raise field_error(where, "a call needs an id and a name")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments.encode("utf-8", "replace")) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict) or is_deep(arguments):
        raise field_error(where, "the arguments must be a JSON object")
    return ToolCall(id=id, name=name, arguments=arguments)


class Calls:
    """The calls of a conversation by their ids, which clients may use again."""

    def __init__(self) -> None:
        self._open: dict[str, list[ToolCall]] = {}
        self._done: dict[str, ToolCall] = {}

    def add(self, calls: Sequence[ToolCall]) -> None:
        """Add the calls of an answer."""
        for call in reversed(calls):
            self._open.setdefault(call.id, []).append(call)

    def result(self, id: Any, content: str, where: str) -> Message:
        """Return the result of the first call without one of the latest answer with this id. Raises Refusal."""
        if isinstance(id, str):
            if waiting := self._open.get(id):
                self._done[id] = waiting.pop()
            if (call := self._done.get(id)) is not None:
                return Message(role="tool", content=content, call_id=id, tool=call.name)
        raise field_error(where, f"no call before has the id `{quoted(str(id))}`")


def read_text(content: Any, where: str, kinds: Collection[str] = ("text",), between: str = "\n") -> str:
    """Return a text, or the texts of parts of these `kinds`. Raises Refusal."""
    if isinstance(content, str):
        return content
    texts = list[str]()
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": str(kind), "text": str(text)} | {"type": "refusal" as kind, "refusal": str(text)} if (
                kind in kinds
            ):
                texts.append(text)
            case {"type": str(kind)}:
                raise field_error(where, f"only text is supported, not `{quoted(kind)}`", "unsupported")
            case _:
                raise field_error(where, "must be text or parts of text")
    return between.join(texts)


def is_deep(value: Any, left: int = _DEEPEST) -> bool:
    """Return whether a value of JSON is nested more deeply than templates should have to render, or has an integer of
    more than 64 bits, which the worker could not be sent.
    """
    if isinstance(value, int):
        return not -(1 << 63) <= value < 1 << 64
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return not left or any(is_deep(one, left - 1) for one in inside)


def _encoded(value: Any, param: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (ValueError, RecursionError):
        raise Refusal(400, f"`{param}` contains an unpaired surrogate.", param=param) from None


def quoted(value: str) -> str:
    """Return a client's value for an error message: one short line."""
    return clean_line(value[: 4 * _MOST_QUOTED])[:_MOST_QUOTED]


def decoded(data: bytes, kind: type[B]) -> B:
    """Decode a body. Raises Refusal, which names the field."""
    try:
        return msgspec.json.decode(data.removeprefix(BOM_UTF8), type=prepared(kind))
    except msgspec.ValidationError as error:
        name, bound = explained(error)
        if name in SamplingSection.__struct_fields__ and "got" not in bound:
            raise field_error(name, bound) from None
        reason, _, where = str(error).partition(" - at ")
        param = where.strip("`").removeprefix("$").lstrip(".") or None
        missing = "missing required field" in reason
        raise Refusal(400, f"{reason}{f' (in `{param}`)' if param and not missing else ''}.", param=param) from None
    except RecursionError:
        raise Refusal(400, "The JSON is nested too deeply.", "invalid_json") from None
    except ValueError as error:  # msgspec.DecodeError, and text that is not UTF-8
        raise Refusal(400, f"The body is not valid JSON: {error}.", "invalid_json") from None


def field_error(param: str, reason: str, code: str = "invalid_request") -> Refusal:
    """Return the refusal of a field."""
    return Refusal(400, f"`{param}`: {reason}.", code, param=param)


def _stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = tuple(stop for stop in ([given] if isinstance(given, str) else given or ()) if stop)
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        limits = f"{MOST_STOPS} strings of {LONGEST_STOP:,} characters"
        raise Refusal(400, f"`stop`: more than {limits} are not supported.", param="stop")
    try:
        "".join(stops).encode()
    except UnicodeEncodeError:
        raise Refusal(400, "`stop` contains an unpaired surrogate.", param="stop") from None
    return stops
