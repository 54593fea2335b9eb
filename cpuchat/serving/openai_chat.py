"""OpenAI's /v1/chat/completions and /v1/completions, with llama-server's `timings_per_token`, `return_progress`,
`ignore_eos`, `repeat_penalty`, ...
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cpuchat.protocol.messages import (
    AnyEvent,
    CallDelta,
    FillIn,
    Generate,
    GenerationFinished,
    PrefillProgress,
    Role,
    TextDelta,
    ToolCall,
)
from cpuchat.serving.errors import Refusal
from cpuchat.serving.replies import Reply, sent_event
from cpuchat.serving.requests import (
    ParsedRequest,
    RequestBody,
    RequestMessages,
    RequestReader,
    Unsupported,
    answer_grammar,
    field_error,
    quoted,
    read_call,
    read_choice,
    read_form,
    read_text,
    read_tools,
)

DONE = b"data: [DONE]\n\n"
MAX_CHOICES = 16
"""Answers of one request; each waits in the queue for itself."""
_NO_LOGPROBS = "log probabilities are not supported; llama-server has them"
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
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logit_bias: Annotated[Any, Unsupported("not supported", ({},))] = None
    response_format: dict[str, Any] | None = None
    grammar: str | None = None
    json_schema: Any = None
    ignore_eos: bool | None = None
    reasoning_budget_tokens: int | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None


class ChatBody(_Completion, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: Annotated[Any, Unsupported(_NO_LOGPROBS, (False,))] = None
    top_logprobs: Annotated[Any, Unsupported(_NO_LOGPROBS, (0,))] = None
    functions: Annotated[list[Any] | None, Unsupported("superseded; send `tools`", ([],))] = None
    modalities: Annotated[list[str] | None, Unsupported("only text is supported", ([], ["text"]))] = None
    reasoning_effort: Any = None
    reasoning: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(_Completion, kw_only=True):
    prompt: str | list[Any]
    logprobs: Annotated[Any, Unsupported(_NO_LOGPROBS, (False,))] = None
    best_of: Annotated[int | None, Unsupported("only one completion is supported", (1,))] = None
    echo: Annotated[bool | None, Unsupported("echo is not supported", (False,))] = None
    suffix: str | None = None


def read_chat(reader: RequestReader, data: bytes) -> ParsedRequest:
    """Read the body of a chat completion. Raises Refusal."""
    body = reader.body(data, ChatBody)
    reader.check_number(body.messages)
    offered = read_tools(reader, body.tools or [], "chat")
    transcript = read_messages(body.messages)
    given = dict(body.chat_template_kwargs or {})
    if (inner := given.pop("reasoning_effort", None)) is not None:
        reasoning, effort = reader.reasoning(inner, "chat_template_kwargs.reasoning_effort")
    elif body.reasoning_effort is None and isinstance(body.reasoning, dict):  # as OpenRouter's clients send it
        reasoning, effort = reader.reasoning(body.reasoning.get("effort"), "reasoning.effort")
    else:
        reasoning, effort = reader.reasoning(body.reasoning_effort, "reasoning_effort")
    wanted = {value for value in given.values() if isinstance(value, bool)}
    if set(given) - {"enable_thinking", "thinking"} or len(wanted) != min(len(given), 1):
        reason = "only reasoning_effort and enable_thinking, true or false, are supported"
        raise field_error("chat_template_kwargs", reason, "unsupported")
    asked = transcript.asked(
        offered,
        calling=read_choice(body.tool_choice, offered, single=body.parallel_tool_calls is False),
        reasoning=wanted.pop() if wanted else reasoning,
        effort=effort,
    )
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _parsed(reader, body, asked, "messages", max_tokens=most, offered=offered)


def read_completion(reader: RequestReader, data: bytes) -> ParsedRequest:
    """Read the body of a plain completion. Raises Refusal."""
    body = reader.body(data, CompletionBody)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if len(prompts) != 1 or not isinstance(prompts[0], str):
        raise Refusal(400, "`prompt` must be a single string; arrays and token ids are not supported.", param="prompt")
    fill = None
    if body.suffix:
        reader.require_fill_in(400, "suffix")
        fill = FillIn(suffix=body.suffix)
    return _parsed(reader, body, Generate(prompt=prompts[0], fill=fill), "prompt", max_tokens=body.max_tokens)


def _parsed(reader: RequestReader, body: _Completion, asked: Generate, param: str, **more: Any) -> ParsedRequest:
    """Return the request, with the fields that both kinds share."""
    also = "stop" if body.stop else "ignore_eos" if body.ignore_eos else ""
    if body.grammar:
        grammar = answer_grammar("grammar", None, body.grammar, also=also)
    elif body.json_schema is not None:
        grammar = answer_grammar("json_schema", body.json_schema, also=also)
    else:
        grammar = read_form(body.response_format, "response_format", also=also)
    return reader.parsed(
        body,
        msgspec.structs.replace(asked, grammar=grammar, ignore_eos=bool(body.ignore_eos)),
        param,
        stop=body.stop,
        reasoning_budget=body.reasoning_budget_tokens,
        with_usage=bool(body.stream_options and body.stream_options.include_usage),
        with_timings=bool(body.timings_per_token),
        with_progress=bool(body.return_progress),
        n=body.n or 1,
        **more,
    )


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
            calls = list[ToolCall | str]()
            for index, one in enumerate(message.tool_calls or ()):
                at, function = f"{where}.tool_calls[{index}]", one.get("function") if isinstance(one, dict) else None
                if not isinstance(function, dict):
                    raise field_error(at, "only calls of functions are supported", "unsupported")
                calls.append(read_call(one.get("id"), function.get("name"), function.get("arguments") or "", at))
            thoughts = message.reasoning if isinstance(message.reasoning, str) else ""
            found.add_answer(content, message.reasoning_content or thoughts, calls)
        else:
            found.add(role, content)
    return found


class ChatReply(Reply):
    """An answer of /v1/chat/completions; reasoning is separate, in `reasoning_content`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, model: str, fingerprint: str, parsed: ParsedRequest) -> None:
        super().__init__(model, fingerprint, parsed)
        self._has_begun = False
        self._n_told = 0  # calls whose names were sent
        self.choices: list[ChatReply] = [self]
        """All answers of the request, this one the first."""

    def another(self, parsed: ParsedRequest) -> Reply:
        reply = type(self)(self.model, self.fingerprint, parsed)
        reply.progress.id, reply.created = self.progress.id, self.created
        self.choices.append(reply)
        return reply

    @property
    def _head(self) -> dict[str, Any]:
        head = {"created": self.created, "id": self.progress.id, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint}

    @property
    def _finish_reason(self) -> str:
        """Return OpenAI's word; "stop" only for an answer that is complete, and matches its grammar."""
        return "length" if not self.progress.is_whole else "tool_calls" if self.progress.calls else "stop"

    def whole(self) -> bytes:
        choices = [
            {"finish_reason": one._finish_reason, "index": one.parsed.index, **one._content()} for one in self.choices
        ]
        body = {"choices": choices, "object": self.kind, **self._head, "usage": self._usage(), **self._timings()}
        return msgspec.json.encode(body)

    def rendered(self, event: AnyEvent) -> bytes | None:
        timings = self._timings() if self.parsed.with_timings else {}
        match event:
            case TextDelta() | CallDelta():
                return self._event([self._choice(event)], timings)
            case GenerationFinished():
                ending = {**self._choice(event), "finish_reason": self._finish_reason}
                return self._event([ending], {} if self.parsed.with_usage else self._timings())
            case PrefillProgress() if self.parsed.with_progress:
                fields = {"total": event.total, "cache": event.cache_n, "processed": event.processed}
                fields["time_ms"] = int(self.progress.timings.prompt_ms)
                return self._event([self._choice(event)], {"prompt_progress": fields, **timings})
            case PrefillProgress():
                return b"" if event.processed == event.cache_n else None
        return None

    def end(self) -> bytes:
        if not self.parsed.with_usage:
            return DONE
        return self._event([], {"usage": self._usage(), **self._timings()}) + DONE

    def _usage(self) -> dict[str, Any]:
        """Return the tokens of the prompt, once, and those of all answers."""
        timings = self.progress.timings
        prompt_tokens, written = timings.cache_n + timings.prompt_n, [one.progress for one in self.choices]
        predicted_n = sum(one.timings.predicted_n for one in written)
        usage: dict[str, Any] = {
            "completion_tokens": predicted_n,
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + predicted_n,
            "prompt_tokens_details": {"cached_tokens": timings.cache_n},
        }
        if n_reasoning := sum(one.n_reasoning for one in written):
            usage["completion_tokens_details"] = {"reasoning_tokens": n_reasoning}
        return usage

    def _timings(self) -> dict[str, Any]:
        return {"timings": self.progress.timing_fields}

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> bytes:
        return sent_event({"choices": choices, **self._head, "object": self.chunk_kind, **more})

    def _choice(self, event: AnyEvent) -> dict[str, Any]:
        return {"finish_reason": None, "index": self.parsed.index, **self._delta(event)}

    def _content(self) -> dict[str, Any]:
        progress = self.progress
        message: dict[str, Any] = {"role": "assistant", "content": progress.text}
        if progress.reasoning:
            message["reasoning_content"] = progress.reasoning
        if progress.calls:
            functions = ((one.id, {"name": one.name, "arguments": one.arguments}) for one in progress.calls)
            calls = [{"id": id, "type": "function", "function": function} for id, function in functions]
            message |= {"content": progress.text or None, "tool_calls": calls}
        return {"message": message}

    def _delta(self, event: AnyEvent) -> dict[str, Any]:
        if isinstance(event, PrefillProgress):
            return {"delta": {"role": "assistant", "content": None}}
        delta: dict[str, Any] = {} if self._has_begun else {"role": "assistant"}
        self._has_begun = True
        match event:
            case TextDelta(channel="reasoning"):
                delta["reasoning_content"] = event.text
            case TextDelta():
                delta["content"] = event.text
            case CallDelta():
                call: dict[str, Any] = {"index": event.index, "function": {"arguments": event.arguments}}
                if event.index >= self._n_told:
                    self._n_told = event.index + 1
                    written = self.progress.calls[event.index]
                    function = {"name": written.name, "arguments": event.arguments}
                    call |= {"id": written.id, "type": "function", "function": function}
                delta["tool_calls"] = [call]
        return {"delta": delta}


class CompletionReply(ChatReply):
    """An answer of /v1/completions: text as the model writes it, reasoning and its markers included."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def _content(self) -> dict[str, Any]:
        return {"text": self.progress.text, "logprobs": None}

    def _delta(self, event: AnyEvent) -> dict[str, Any]:
        return {"text": event.text if isinstance(event, TextDelta) else "", "logprobs": None}
