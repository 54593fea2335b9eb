"""Request bodies of the OpenAI interface: checked, and turned into what the engine understands.

Fields that are not known are ignored, as OpenAI-compatible servers do: programs send many that change nothing here.
What would change the answer and is not supported is refused, never ignored. llama-server's additions
(`timings_per_token`, `return_progress`, `ignore_eos`, `repeat_penalty`, ...) mean what they mean there. `return_queue`
is ours: chunks with the place in the queue while a stream waits. `cache_salt` is vLLM's: requests reuse nothing of
those with another one. A request that is not answered gets an error object as OpenAI's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta
from starlette.responses import Response

from cpuchat.base.errors import UsageError
from cpuchat.base.text import clean_line
from cpuchat.config.settings import SamplingSection, Settings, explained
from cpuchat.grammar.gbnf import LONGEST_FORM, check_grammar
from cpuchat.grammar.schema import schema_grammar
from cpuchat.protocol.messages import Failed, Generate, Message, Role, Sampling, Speculation

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 503: "unavailable_error"}
_BY_CODE = {
    "context_full": (400, "context_length_exceeded"),
    "usage": (400, "invalid_request"),
    "template": (400, "chat_template_failed"),
    "grammar_unmet": (400, "invalid_grammar"),
    "does_not_fit": (503, "does_not_fit"),
    "interrupted": (503, "shutting_down"),
}


class Refusal(Exception):
    """Raised when a request is refused or fails.

    Args:
        status: of HTTP.
        message: what happened, and what to do.
        code: a stable word for programs ("context_length_exceeded").
        param: the field of the request that is at fault.
        retry_after: seconds; 0: a retry is of no use.
        more: further fields of the error object.
        hint: for whoever runs the server; it is not sent.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str = "invalid_request",
        *,
        param: str | None = None,
        retry_after: int = 0,
        more: dict[str, Any] | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.hint = hint
        self._more = more or {}

    @classmethod
    def of(cls, failed: Failed, n_ctx: int) -> Refusal:
        """Return the refusal for a failure of the engine, whose context has `n_ctx` tokens."""
        status, code = _BY_CODE.get(failed.code, (500, failed.code))
        # Hints name options of the program and places of files: of no use over the network.
        more: dict[str, Any] = {}
        if failed.code == "context_full":
            more = {"n_ctx": n_ctx, **({"n_prompt_tokens": failed.n_tokens} if failed.n_tokens else {})}
        return cls(status, failed.message, code, more=more, hint=failed.hint if status >= 500 else "")

    @property
    def logged(self) -> str:
        """Return what the log says: of a client's error only its code and field, because its message may quote."""
        if self.status >= 500:
            return clean_line(self.message)
        return f"{self.code} ({self.param})" if self.param else self.code

    @property
    def body(self) -> bytes:
        """Return the error object as JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        if self.code == "context_length_exceeded":
            kind = "exceed_context_size_error"  # as llama-server; the code is OpenAI's
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self._more}
        return msgspec.json.encode({"error": error})

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """Return the response, with these headers too."""
        found = {**(headers or {}), "content-type": "application/json"}
        if self.retry_after:
            found["retry-after"] = str(self.retry_after)
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        return Response(self.body, self.status, found)


BYTES_PER_TOKEN = 64
"""More text than this for each token of the context cannot fit; it is refused before the engine tokenizes it."""
MOST_STOPS, LONGEST_STOP = 16, 1000
STREAM_SECONDS, WHOLE_SECONDS = 0.08, 1.0
"""Between two events with text: of a stream, and where only the end is sent."""
_MOST_QUOTED = 80
"""Characters of a wrong value that an error repeats."""
_INT32 = (1 << 31) - 1

_NO_TOOLS = "cpuchat serve does not support tools; send the request without them"
_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


@dataclass(frozen=True)
class Unsupported:
    """Metadata of a field that is refused, because of `reason`, unless it is left out or has one of these values."""

    reason: str
    neutral: tuple[Any, ...]


_NO_LOGPROBS = "log probabilities are not supported"


class _Body(SamplingSection, kw_only=True, forbid_unknown_fields=False):
    """Fields that both kinds of requests share; those of sampling have the bounds of the settings."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)] | None = None  # type: ignore[assignment]
    top_k: int | None = None
    n: Annotated[int | None, Unsupported("only one answer is supported", (1,))] = None
    logprobs: Annotated[bool | int | None, Unsupported(_NO_LOGPROBS, (False,))] = None
    logit_bias: Annotated[dict[str, Any] | None, Unsupported("a logit bias is not supported", ({},))] = None
    response_format: dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: Any = None
    ignore_eos: bool | None = None
    reasoning_budget_tokens: int | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    return_queue: bool | None = None
    cache_salt: str | None = None


class ChatBody(_Body, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: Annotated[list[Any] | None, Unsupported(_NO_TOOLS, ([],))] = None
    functions: Annotated[list[Any] | None, Unsupported(_NO_TOOLS, ([],))] = None
    top_logprobs: Annotated[int | None, Unsupported(_NO_LOGPROBS, (0,))] = None
    modalities: Annotated[list[str] | None, Unsupported("only text is supported", ([], ["text"]))] = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(_Body, kw_only=True):
    prompt: str | list[Any]
    best_of: Annotated[int | None, Unsupported("only one completion is supported", (1,))] = None
    echo: Annotated[bool | None, Unsupported("echo is not supported", (False,))] = None
    suffix: Annotated[str | None, Unsupported("a suffix is not supported", ("",))] = None


@cache
def _unsupported(kind: type[_Body]) -> dict[str, Unsupported]:
    """Return the fields of a body that are refused."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {name: one for name, hint in hints for one in get_args(hint) if isinstance(one, Unsupported)}


B = TypeVar("B", bound=msgspec.Struct)


class ControlBody(msgspec.Struct):
    """A command to a running answer."""

    id: str
    action: Literal["reasoning_end"]


@dataclass(frozen=True)
class ParsedRequest:
    """A request that can be answered. `with_timings` in every chunk; `with_progress` of the prompt, `with_queue`: the
    place in the queue (of streams)."""

    request: Generate
    stream: bool
    with_usage: bool
    with_timings: bool
    with_progress: bool
    with_queue: bool = False

    def of_client(self, client: str) -> ParsedRequest:
        """Return it as a request of `client`, which reuses nothing of what was evaluated for others."""
        owned = msgspec.structs.replace(self.request, owner=f"{client} {self.request.owner}")
        return replace(self, request=owned)


class RequestReader:
    """Reads request bodies for one model.

    Args:
        names: that the model answers to.
        n_ctx: tokens of its context.
        settings: for values that a request does not give.
        speculation: how answers are drafted.
    """

    def __init__(self, names: Collection[str], n_ctx: int, settings: Settings, speculation: Speculation) -> None:
        self._names = names
        self._n_ctx = n_ctx
        self._settings = settings
        self._speculation = speculation

    @property
    def most_body(self) -> int:
        """Return the bytes of a body beyond which its text cannot fit into the context."""
        return 2 * LONGEST_FORM + 2 * BYTES_PER_TOKEN * self._n_ctx

    def chat(self, data: bytes) -> ParsedRequest:
        """Read the body of a chat completion. Raises Refusal."""
        body = _decoded(data, ChatBody)
        self._check(body)
        if len(body.messages) > self._n_ctx:  # a template writes a token or more for each
            raise self._too_long(f"{len(body.messages):,} messages", "messages")
        messages = tuple(_messages(body.messages))
        self._check_length("messages", (message.content for message in messages))
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        reasoning = _reasoning(body.chat_template_kwargs, self._settings.chat.request_options()["reasoning"])
        return self._parsed(body, limit, messages=messages, reasoning=reasoning)

    def completion(self, data: bytes) -> ParsedRequest:
        """Read the body of a plain completion. Raises Refusal."""
        body = _decoded(data, CompletionBody)
        self._check(body)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if len(prompts) != 1 or not isinstance(prompts[0], str):
            raise Refusal(
                400, "`prompt` must be a single string; arrays and token ids are not supported.", param="prompt"
            )
        self._check_length("prompt", prompts)
        return self._parsed(body, body.max_tokens, prompt=prompts[0], unsplit=True)

    def _check(self, body: _Body) -> None:
        if body.model and body.model not in self._names:
            served = ", ".join(f"`{name}`" for name in self._names)
            message = f"The model `{quoted(body.model)}` is not served here. Served: {served}."
            raise Refusal(404, message, "model_not_found", param="model")
        for name, field in _unsupported(type(body)).items():
            if getattr(body, name) not in (None, *field.neutral):
                raise _field_error(name, field.reason, "unsupported")

    def _check_length(self, param: str, texts: Iterable[str]) -> None:
        """Refuse what is not valid Unicode, or so long that it cannot fit."""
        try:
            n_bytes = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError:
            raise Refusal(400, f"`{param}` contains an unpaired surrogate.", param=param) from None
        if n_bytes > BYTES_PER_TOKEN * self._n_ctx:
            raise self._too_long(f"{n_bytes:,} bytes", param)

    def _too_long(self, size: str, param: str) -> Refusal:
        message = f"The prompt has {size}, but the context holds only {self._n_ctx:,} tokens."
        return Refusal(400, message, "context_length_exceeded", param=param, more={"n_ctx": self._n_ctx})

    def _parsed(self, body: _Body, max_tokens: int | None, **what: Any) -> ParsedRequest:
        stream = bool(body.stream)
        request = Generate(
            sampling=self._sampling(body),
            max_tokens=self._limit(max_tokens),
            stop=_stops(body.stop),
            speculation=self._speculation,
            trim=False,
            ignore_eos=bool(body.ignore_eos),
            grammar=_grammar(body),
            reasoning_budget=self._budget(body.reasoning_budget_tokens),
            frame_seconds=STREAM_SECONDS if stream else WHOLE_SECONDS,
            owner=body.cache_salt or "",
            keeps=not body.cache_salt,  # a salt is for one session, often
            **what,
        )
        return ParsedRequest(
            request=request,
            stream=stream,
            with_usage=bool(body.stream_options and body.stream_options.include_usage),
            with_timings=bool(body.timings_per_token),
            with_progress=bool(body.return_progress),
            with_queue=stream and bool(body.return_queue),
        )

    def _sampling(self, body: _Body) -> Sampling:
        """Return the settings with what the request gives."""
        if body.top_k is not None and body.top_k < -1:
            raise _field_error("top_k", "expected `int` >= 0")
        values = msgspec.structs.asdict(self._settings.sampling)
        values |= {name: given for name in values if (given := getattr(body, name)) is not None}
        for name in ("top_k", "repeat_last_n"):
            if values[name] is not None:
                values[name] = max(min(values[name], _INT32), 0)  # -1 is "off" in other servers
        return SamplingSection(**values).sampling()

    def _budget(self, given: int | None) -> int | None:
        """Return `Generate.reasoning_budget`; -1 means "no limit" in llama-server."""
        if given is None:
            return self._settings.chat.request_options()["reasoning_budget"]
        if given < -1:
            raise _field_error("reasoning_budget_tokens", f"must be -1 or more, not {given}")
        return None if given == -1 else min(given, self._n_ctx)

    def _limit(self, given: int | None) -> int:
        """Return `Generate.max_tokens`; -1 means "no limit" in llama-server."""
        if given is None:
            return self._settings.chat.max_tokens
        if given == -1:
            return 0
        if given < 1:
            raise Refusal(400, f"`max_tokens` must be at least 1, not {given}.", param="max_tokens")
        return min(given, self._n_ctx)


def _grammar(body: _Body) -> str:
    """Return the grammar that the answer must match, "" for any answer. Raises Refusal."""
    param, schema = "response_format", _format_schema(body.response_format)
    if body.json_schema is not None:
        param, schema = "json_schema", body.json_schema
    if body.grammar:
        param, schema = "grammar", None
    elif schema is None:
        return ""
    if body.stop or body.ignore_eos:
        raise _field_error("stop" if body.stop else "ignore_eos", f"`{param}` decides where the answer ends")
    if len(body.grammar or msgspec.json.encode(schema)) > LONGEST_FORM:
        raise _field_error(param, f"larger than {LONGEST_FORM:,} bytes", "unsupported")
    try:
        if body.grammar:
            check_grammar(body.grammar, param)
            return body.grammar
        return schema_grammar(schema, param)
    except UsageError as error:
        reason = clean_line(f"{error.message} {error.hint}".strip())[: 5 * _MOST_QUOTED]
        raise Refusal(400, reason, "invalid_grammar", param=param) from None


def _format_schema(form: dict[str, Any] | None) -> Any:
    """Return the JSON schema of a `response_format`, None for text. Raises Refusal."""
    match (form or {}).get("type", "text"), form:
        case "text", _:
            return None
        case "json_object", {"schema": dict(schema)}:  # llama-server's
            return schema
        case "json_object", _:
            return {"type": "object"}
        case "json_schema", {"json_schema": {"schema": dict(schema)}}:
            return schema
        case "json_schema", _:
            raise _field_error("response_format", "`json_schema.schema` is missing")
    raise _field_error("response_format", "only text, json_object and json_schema are supported", "unsupported")


def _reasoning(arguments: dict[str, Any] | None, default: bool | None) -> bool | None:
    """Return `Generate.reasoning` for the arguments of the chat template. Raises Refusal."""
    given = arguments or {}
    wanted = {value for value in given.values() if isinstance(value, bool)}
    if set(given) - {"enable_thinking", "thinking"} or len(wanted) != min(len(given), 1):
        raise _field_error("chat_template_kwargs", "only enable_thinking is supported, true or false", "unsupported")
    return wanted.pop() if wanted else default


def read_control(data: bytes) -> ControlBody:
    """Read a command to a running answer. Raises Refusal."""
    return _decoded(data, ControlBody)


def quoted(value: str) -> str:
    """Return a client's value for an error message: one short line."""
    return clean_line(value[: 4 * _MOST_QUOTED])[:_MOST_QUOTED]


def _decoded(data: bytes, kind: type[B]) -> B:
    """Decode a body. Raises Refusal, which names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        name, bound = explained(error)
        if name in SamplingSection.__struct_fields__ and "got" not in bound:
            raise _field_error(name, bound) from None
        reason, _, where = str(error).partition(" - at ")
        param = where.strip("`").removeprefix("$").lstrip(".") or None
        missing = "missing required field" in reason
        raise Refusal(400, f"{reason}{f' (in `{param}`)' if param and not missing else ''}.", param=param) from None
    except RecursionError:
        raise Refusal(400, "The JSON is nested too deeply.", "invalid_json") from None
    except ValueError as error:  # msgspec.DecodeError, and text that is not UTF-8
        raise Refusal(400, f"The body is not valid JSON: {error}.", "invalid_json") from None


def _messages(given: list[ChatMessage]) -> Iterable[Message]:
    if not given:
        raise Refusal(400, "`messages` is empty.", param="messages")
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role = _ROLES.get(message.role)
        if role is None:
            reason = f"`{quoted(message.role)}` is not supported, only {', '.join(_ROLES)}"
            raise _field_error(f"{where}.role", reason)
        if message.tool_calls:
            raise _field_error(f"{where}.tool_calls", _NO_TOOLS, "unsupported")
        content = f"{where}.content"
        if message.content is None and role != "assistant":
            raise _field_error(content, "missing")
        yield Message(role=role, content=_text(message.content, content), reasoning=message.reasoning_content or "")
    if given[-1].role == "assistant":
        raise Refusal(400, "The last message is the assistant's: prefill is not supported.", param="messages")


def _text(content: str | list[ContentPart] | None, param: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise _field_error(param, f"only text is supported, not `{quoted(part.type)}`", "unsupported")
    return "".join(part.text or "" for part in content)


def _field_error(param: str, reason: str, code: str = "invalid_request") -> Refusal:
    return Refusal(400, f"`{param}`: {reason}.", code, param=param)


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = tuple(stop for stop in ([given] if isinstance(given, str) else given or ()) if stop)
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        limits = f"{MOST_STOPS} strings of {LONGEST_STOP:,} characters"
        raise Refusal(400, f"`stop`: more than {limits} are not supported.", param="stop")
    try:
        "".join(stops).encode()
    except UnicodeEncodeError:
        raise Refusal(400, "`stop` contains an unpaired surrogate.", param="stop") from None
    return stops
