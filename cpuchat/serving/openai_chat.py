"""OpenAI's /v1/chat/completions and /v1/completions, with the additions of llama-server.

`timings_per_token`, `return_progress`, `ignore_eos`, `repeat_penalty`, ... mean what they mean there. `return_queue` is
ours: chunks with the place in the queue while a stream waits.
"""

from __future__ import annotations

import codecs
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec

from cpuchat.protocol.messages import (
    AnyEvent,
    CallDelta,
    GenerationFinished,
    PrefillProgress,
    Role,
    TextDelta,
    TokenLogprob,
    ToolCall,
)
from cpuchat.serving.errors import Refusal
from cpuchat.serving.replies import Reply, ReplyChoice, sent_event, timings_fields
from cpuchat.serving.requests import (
    MAX_ANSWERS,
    Asked,
    ParsedRequest,
    RequestBody,
    RequestMessages,
    RequestReader,
    Unsupported,
    answer_grammar,
    decoded,
    field_error,
    quoted,
    read_call,
    read_choice,
    read_text,
    read_tools,
)

DONE = b"data: [DONE]\n\n"
_MAX_LOGPROBS = 20
_ROLES: dict[str, Role | Literal["tool"]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class _Completion(RequestBody, kw_only=True):
    """Fields that both kinds of requests share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: Any = None
    ignore_eos: bool | None = None
    reasoning_budget_tokens: int | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    return_queue: bool | None = None


class ChatBody(_Completion, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: Annotated[list[Any] | None, Unsupported("superseded; send `tools`", ([],))] = None
    modalities: Annotated[list[str] | None, Unsupported("only text is supported", ([], ["text"]))] = None
    reasoning_effort: Any = None
    reasoning: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(_Completion, kw_only=True):
    prompt: str | list[Any]
    logprobs: bool | int | None = None
    best_of: Annotated[int | None, Unsupported("only one completion is supported", (1,))] = None
    echo: Annotated[bool | None, Unsupported("echo is not supported", (False,))] = None
    suffix: Annotated[str | None, Unsupported("a suffix is not supported", ("",))] = None


class ControlBody(msgspec.Struct):
    """A command to a running answer."""

    id: str
    action: Literal["reasoning_end"]


def read_control(data: bytes) -> ControlBody:
    """Read a command to a running answer. Raises Refusal."""
    return decoded(data, ControlBody)


def read_chat(reader: RequestReader, data: bytes) -> ParsedRequest:
    """Read the body of a chat completion. Raises Refusal."""
    body = reader.body(data, ChatBody)
    reader.check_number(body.messages)
    offered = read_tools(reader, body.tools or [], "chat")
    transcript = read_messages(body.messages)
    reasoning, effort = _reasoning(reader, body)
    asked = Asked(
        messages=tuple(transcript.messages),
        continues=transcript.continues,
        offered=offered,
        calling=read_choice(body.tool_choice, offered, single=body.parallel_tool_calls is False),
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
        grammar=_grammar(body),
        reasoning=reasoning,
        effort=effort,
        logprobs=_logprobs(body),
        **_shared(body),
    )
    return reader.parsed(body, asked)


def read_completion(reader: RequestReader, data: bytes) -> ParsedRequest:
    """Read the body of a plain completion. Raises Refusal."""
    body = reader.body(data, CompletionBody)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if len(prompts) != 1 or not isinstance(prompts[0], str):
        raise Refusal(400, "`prompt` must be a single string; arrays and token ids are not supported.", param="prompt")
    top = None if body.logprobs is None or body.logprobs is False else int(body.logprobs)  # 0: the chosen tokens alone
    if top is not None and not 0 <= top <= _MAX_LOGPROBS:
        raise field_error("logprobs", f"0 to {_MAX_LOGPROBS} are supported")
    asked = Asked(
        prompt=prompts[0], max_tokens=body.max_tokens, grammar=_grammar(body), logprobs=top, **_shared(body)
    )  # fmt: skip
    return reader.parsed(body, asked, "prompt")


def _shared(body: _Completion) -> dict[str, Any]:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_ANSWERS:
        raise field_error("n", f"1 to {MAX_ANSWERS} answers are supported", "unsupported")
    return {
        "n": n,
        "stop": body.stop,
        "ignore_eos": bool(body.ignore_eos),
        "reasoning_budget": body.reasoning_budget_tokens,
        "logit_bias": body.logit_bias,
        "with_usage": bool(body.stream_options and body.stream_options.include_usage),
        "with_timings": bool(body.timings_per_token),
        "with_progress": bool(body.return_progress),
        "with_queue": bool(body.return_queue),
    }


def _logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs or 0
    if not 0 <= top <= _MAX_LOGPROBS:
        raise field_error("top_logprobs", f"0 to {_MAX_LOGPROBS} are supported")
    if top and not body.logprobs:
        raise field_error("top_logprobs", "needs `logprobs`")
    return top if body.logprobs else None


def read_messages(given: list[ChatMessage]) -> RequestMessages:
    """Return the messages. Raises Refusal."""
    if not given:
        raise Refusal(400, "`messages` is empty.", param="messages")
    found = RequestMessages()
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        role = _ROLES.get(message.role)
        if role is None:
            reason = f"`{quoted(message.role)}` is not supported, only {', '.join(_ROLES)}"
            raise field_error(f"{where}.role", reason)
        if message.content is None and role in ("system", "user"):
            raise field_error(f"{where}.content", "missing")
        content = read_text(message.content or "", f"{where}.content", between="", of_tool=role == "tool")
        if role == "tool":
            found.add_result(message.tool_call_id, content)
        elif role == "assistant":
            calls = _calls(message.tool_calls or [], f"{where}.tool_calls")
            found.add_answer(
                content,
                message.reasoning_content or (message.reasoning if isinstance(message.reasoning, str) else ""),
                tuple(calls),
            )
        else:
            found.add(role, content)
    return found


def _calls(given: list[Any], where: str) -> Iterator[ToolCall | str]:
    for number, one in enumerate(given):
        match one:
            case {"function": dict(function)}:
                name, arguments = function.get("name"), function.get("arguments") or ""
            case {"custom": {"name": name, "input": str(text)}}:
                arguments = {"input": text}
            case _:
                raise field_error(f"{where}[{number}]", "only calls of functions are supported", "unsupported")
        yield read_call(one.get("id"), name, arguments, f"{where}[{number}]")


def _grammar(body: _Completion) -> str:
    """Return the grammar that the answer must match, "" for any answer. Raises Refusal."""
    param, schema = "response_format", _format_schema(body.response_format)
    if body.json_schema is not None:
        param, schema = "json_schema", body.json_schema
    if body.grammar:
        param, schema = "grammar", None
    elif schema is None:
        return ""
    also = "stop" if body.stop else "ignore_eos" if body.ignore_eos else ""
    return answer_grammar(param, schema, body.grammar or "", also=also)


def _format_schema(form: dict[str, Any] | None) -> Any:
    """Return the JSON schema of a `response_format`, None for text. Raises Refusal."""
    match (form or {}).get("type", "text"), form:
        case "text", _:
            return None
        case "json_object", {"schema": dict(schema)}:  # llama-server's
            return schema
        case "json_object", _:
            return {"type": "object"}
        case "json_schema", {"json_schema": {"schema": dict(schema)}} | {"schema": dict(schema)}:
            return schema
        case "json_schema", _:
            raise field_error("response_format", "`json_schema.schema` is missing")
    raise field_error("response_format", "only text, json_object and json_schema are supported", "unsupported")


def _reasoning(reader: RequestReader, body: ChatBody) -> tuple[bool | None, str]:
    """Return `Generate.reasoning` and `Generate.effort`. Raises Refusal."""
    given = dict(body.chat_template_kwargs or {})
    if (inner := given.pop("reasoning_effort", None)) is not None:
        choice, effort = reader.reasoning(inner, "chat_template_kwargs.reasoning_effort")
    elif body.reasoning_effort is None and isinstance(body.reasoning, dict):  # as OpenRouter's clients send it
        choice, effort = reader.reasoning(body.reasoning.get("effort"), "reasoning.effort")
    else:
        choice, effort = reader.reasoning(body.reasoning_effort, "reasoning_effort")
    wanted = {value for value in given.values() if isinstance(value, bool)}
    if set(given) - {"enable_thinking", "thinking"} or len(wanted) != min(len(given), 1):
        reason = "only reasoning_effort and enable_thinking, true or false, are supported"
        raise field_error("chat_template_kwargs", reason, "unsupported")
    return wanted.pop() if wanted else choice, effort


class _CompletionsReply(Reply):
    """What the replies of both endpoints share."""

    kind = ""
    chunk_kind = ""

    @property
    def _head(self) -> dict[str, Any]:
        head = {"created": self.created, "id": self.progress.id, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint}

    def whole(self) -> bytes:
        choices = [
            {"finish_reason": _finish_reason(one), "index": index, **self._content(one)}
            for index, one in enumerate(self.progress.choices)
        ]
        body = {"choices": choices, "object": self.kind, **self._head, "usage": self._usage(), **self._timings()}
        return msgspec.json.encode(body)

    def rendered(self, event: AnyEvent) -> bytes | None:
        asked = self.parsed.asked
        timings = self._timings() if asked.with_timings else {}
        match event:
            case TextDelta() | CallDelta():
                return self._event([self._choice(event)], timings)
            case GenerationFinished():
                is_last = self.progress.index + 1 == asked.n
                ending = {**self._choice(event), "finish_reason": _finish_reason(self.progress.choice)}
                return self._event([ending], self._timings() if is_last and not asked.with_usage else {})
            case PrefillProgress() if asked.with_progress and not self.progress.index:
                fields = {
                    "total": event.total,
                    "cache": event.cache_n,
                    "processed": event.processed,
                    "time_ms": int(self.progress.prompt_ms),
                }
                return self._event([self._choice(event)], {"prompt_progress": fields, **timings})
            case PrefillProgress():
                return b"" if event.processed == event.cache_n else None
        return None

    def end(self) -> bytes:
        if not self.parsed.asked.with_usage:
            return DONE
        return self._event([], {"usage": self._usage(), **self._timings()}) + DONE

    def failed(self, refusal: Refusal) -> bytes:
        return b"data: " + refusal.body + b"\n\n"

    def queue_chunk(self, **queue: float) -> bytes:
        return self._event([self._choice(None)], {"queue": queue})

    def _usage(self) -> dict[str, Any]:
        timings = self.progress.timings
        prompt_tokens = timings.cache_n + timings.prompt_n
        usage: dict[str, Any] = {
            "completion_tokens": timings.predicted_n,
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + timings.predicted_n,
            "prompt_tokens_details": {"cached_tokens": timings.cache_n},
        }
        if self.progress.n_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.progress.n_reasoning}
        return usage

    def _timings(self) -> dict[str, Any]:
        return {"timings": timings_fields(self.progress.timings)}

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        return sent_event({"choices": choices, **self._head, "object": self.chunk_kind, **more})

    def _choice(self, event: AnyEvent | None) -> dict[str, Any]:
        return {"finish_reason": None, "index": self.progress.index, **self._delta(event)}

    @abstractmethod
    def _content(self, choice: ReplyChoice) -> dict[str, Any]:
        """Return the part of a whole answer's choice."""

    @abstractmethod
    def _delta(self, event: AnyEvent | None) -> dict[str, Any]:
        """Return what an event adds to the choice. None: the request waits."""


def _finish_reason(choice: ReplyChoice) -> str:
    """Return OpenAI's word; "stop" only for an answer that is complete, and matches its grammar."""
    if not choice.is_whole:
        return "length"
    return "tool_calls" if choice.calls else "stop"


class ChatReply(_CompletionsReply):
    """An answer of /v1/chat/completions; reasoning is separate, in `reasoning_content`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, model: str, fingerprint: str, parsed: ParsedRequest) -> None:
        super().__init__(model, fingerprint, parsed)
        self._n_begun = 0
        self._told = set[tuple[int, int]]()  # calls whose names were sent, of the answers

    def _content(self, choice: ReplyChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {"id": one.id, "type": kind.type, kind.type: kind.item(one.arguments)}
                for one in choice.calls
                for kind in [self.kind_of(one)]
            ]
        return {"message": message, **self._logprobs(choice.logprobs)}

    def _delta(self, event: AnyEvent | None) -> dict[str, Any]:
        if event is None or isinstance(event, PrefillProgress):
            return {"delta": {"role": "assistant", "content": None}}
        delta: dict[str, Any] = {}
        if self._n_begun <= self.progress.index:  # in the first chunk only
            delta, self._n_begun = {"role": "assistant"}, self.progress.index + 1
        match event:
            case TextDelta(channel="reasoning"):
                delta["reasoning_content"] = event.text
            case TextDelta():
                delta["content"] = event.text
                return {"delta": delta, **self._logprobs(event.logprobs if event.text else ())}
            case CallDelta():
                delta["tool_calls"] = [self._call_delta(event)]
        return {"delta": delta}

    def _call_delta(self, event: CallDelta) -> dict[str, Any]:
        call = self.progress.choice.calls[event.index]
        kind = self.kind_of(call)
        piece = {"arguments": event.arguments} if kind.type == "function" else {"input": self.new_input(event.index)}
        if (key := (self.progress.index, event.index)) in self._told:
            return {"index": event.index, kind.type: piece}
        self._told.add(key)
        return {"index": event.index, "id": call.id, "type": kind.type, kind.type: {"name": kind.name, **piece}}

    def _logprobs(self, given: Iterable[TokenLogprob]) -> dict[str, Any]:
        if self.parsed.request.output.logprobs is None:
            return {}
        told = [
            {**_token(one.piece, one.logprob), "top_logprobs": [_token(*other) for other in one.top]} for one in given
        ]
        return {"logprobs": {"content": told}}


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}


class CompletionReply(_CompletionsReply):
    """An answer of /v1/completions: text as the model writes it, reasoning and its markers included."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def _content(self, choice: ReplyChoice) -> dict[str, Any]:
        return {"text": choice.text, "logprobs": self._logprobs(choice.logprobs, 0)}

    def _delta(self, event: AnyEvent | None) -> dict[str, Any]:
        if not isinstance(event, TextDelta):
            return {"text": "", "logprobs": None}
        before = len(self.progress.choice.text) - len(event.text)
        return {"text": event.text, "logprobs": self._logprobs(event.logprobs if event.text else (), before)}

    def _logprobs(self, given: Iterable[TokenLogprob], offset: int) -> dict[str, Any] | None:
        """Return the log probabilities of tokens whose text begins after so many characters."""
        if self.parsed.request.output.logprobs is None:
            return None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character can have several tokens
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in given:
            told["tokens"].append(_piece_text(one.piece))
            told["token_logprobs"].append(one.logprob)
            told["top_logprobs"].append({_piece_text(piece): logprob for piece, logprob in one.top})
            told["text_offset"].append(offset)
            offset += len(decoder.decode(one.piece))
        return told


def _piece_text(piece: bytes) -> str:
    """Return a token as text: one that is a part of a character as OpenAI writes it, `bytes:\\xe2\\x80`."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
