"""Anthropic's /v1/messages and /v1/messages/count_tokens, with our sampling settings too. What was reused of the prompt
is `cache_read_input_tokens`; `cache_control` changes nothing, because everything is reused that can be.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import msgspec

from cpuchat.protocol.messages import ToolCall
from cpuchat.serving.errors import Refusal
from cpuchat.serving.replies import BlockReply, sent_event
from cpuchat.serving.requests import (
    ParsedRequest,
    RequestBody,
    RequestMessages,
    RequestReader,
    Unsupported,
    field_error,
    quoted,
    read_call,
    read_form,
    read_rule,
    read_text,
    read_tools,
)

_ELSEWHERE = ("thinking", "redacted_thinking", "server_tool_use", "mcp_tool_use", "container_upload")
"""Blocks of earlier answers that are left out, with their results: they ran elsewhere, or cannot be read."""


class InputMessage(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class MessagesBody(RequestBody, kw_only=True):
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    mcp_servers: Annotated[list[Any] | None, Unsupported("servers of tools are the client's", ([],))] = None
    container: Annotated[Any, Unsupported("there are no containers here", ())] = None


def read_messages(reader: RequestReader, data: bytes) -> ParsedRequest:
    """Read the body of a request. Raises Refusal."""
    body = reader.body(data, MessagesBody)
    reader.check_number(body.messages)
    offered = read_tools(reader, body.tools or [], "messages")
    if not body.messages:
        raise Refusal(400, "`messages` is empty.", param="messages")
    transcript = RequestMessages()
    if system := read_text(body.system or "", "system"):
        transcript.add("system", system)
    for number, message in enumerate(body.messages):
        where = f"messages[{number}]"
        if message.role == "assistant":
            _add_answer(message.content, transcript, where)
        elif message.role == "user":
            _add_question(message.content, transcript, where)
        elif message.role == "system":
            transcript.add("system", read_text(message.content, where))
        else:
            raise field_error(f"{where}.role", f"`{quoted(message.role)}` is not supported, only user and assistant")
    default, effort = reader.reasoning((body.output_config or {}).get("effort"), "output_config.effort")
    reasoning, budget = default, None
    match body.thinking:
        case None:
            pass
        case {"type": "enabled", "budget_tokens": int(budget)} if budget > 0:
            reasoning = True
        case {"type": "enabled" | "adaptive"}:
            reasoning, budget = True, None
        case {"type": "disabled"}:
            reasoning, budget = False, None
        case _:
            raise field_error("thinking", "must be enabled, adaptive or disabled")
    given = body.tool_choice or {"type": "auto"}
    mode, single = str(given.get("type")), bool(given.get("disable_parallel_tool_use"))
    named = (str(given.get("name")),) if mode == "tool" else ()
    asked = transcript.asked(
        offered,
        calling=read_rule("required" if named else mode, named, offered, single=single),
        grammar=read_form(
            body.output_format or (body.output_config or {}).get("format"),
            "output_config.format",
            also="stop_sequences" if body.stop_sequences else "",
        ),
        reasoning=reasoning,
        effort=effort,
    )
    return reader.parsed(
        body, asked, offered=offered, max_tokens=body.max_tokens, stop=body.stop_sequences, reasoning_budget=budget
    )


def _add_answer(content: str | list[dict[str, Any]], found: RequestMessages, where: str) -> None:
    texts, reasoning, calls = list[str](), list[str](), list[ToolCall | str]()
    for number, block in enumerate([{"type": "text", "text": content}] if isinstance(content, str) else content):
        at, kind = f"{where}.content[{number}]", str(block.get("type"))
        match block:
            case {"type": "thinking", "thinking": str(thought)}:
                reasoning.append(thought)
            case {"type": "tool_use"}:
                calls.append(read_call(block.get("id"), block.get("name"), block.get("input") or {}, at))
            case _ if kind not in _ELSEWHERE and not kind.endswith("_tool_result"):
                texts.append(read_text([block], at))
    found.add_answer("\n".join(texts), "\n".join(reasoning), calls)


def _add_question(content: str | list[dict[str, Any]], found: RequestMessages, where: str) -> None:
    """Add the results of calls in a message of the user, and what else it says."""
    texts = [content] if isinstance(content, str) else list[str]()
    n_before = len(found.messages)
    for number, block in enumerate([] if isinstance(content, str) else content):
        at = f"{where}.content[{number}]"
        if block.get("type") == "tool_result":
            result = read_text(block.get("content") or "", at, of_tool=True)
            found.add_result(block.get("tool_use_id"), f"Error: {result}" if block.get("is_error") else result)
        else:
            texts.append(read_text([block], at))
    if texts or n_before == len(found.messages):
        found.add("user", "\n".join(texts))


class MessagesReply(BlockReply):
    """An answer of /v1/messages: blocks of thinking, text and calls."""

    id_prefix = "msg_"
    ping = sent_event({"type": "ping"}, "ping")
    _n_blocks = 0

    def whole(self) -> bytes:
        progress = self.progress
        content: list[dict[str, Any]] = []
        if progress.reasoning:
            content.append({"type": "thinking", "thinking": progress.reasoning, "signature": ""})
        if progress.text:
            content.append({"type": "text", "text": progress.text})
        for call in progress.calls:
            given: Any = {}
            with contextlib.suppress(ValueError):  # it was cut
                given = msgspec.json.decode(call.arguments or "{}")
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        return msgspec.json.encode(self._message(content, self._stop_reason))

    def end(self) -> bytes:
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        end = sent_event({"type": "message_delta", "delta": delta, "usage": self._usage()}, "message_delta")
        return end + sent_event({"type": "message_stop"}, "message_stop")

    def failed(self, refusal: Refusal) -> bytes:
        return sent_event(refusal.anthropic(), "error")

    def _begun(self) -> bytes:
        return sent_event({"type": "message_start", "message": self._message([], None)}, "message_start")

    def _started(self, kind: str | int) -> bytes:
        if isinstance(kind, int):
            call = self.progress.calls[kind]
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        elif kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        return self._of_block("content_block_start", content_block=block)

    def _added(self, kind: str | int, text: str) -> bytes:
        if isinstance(kind, int):
            delta = {"type": "input_json_delta", "partial_json": text}
        elif kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        return self._of_block("content_block_delta", delta=delta)

    def _closed(self, kind: str | int) -> bytes:
        sent = self._of_block("content_block_stop")
        self._n_blocks += 1
        return sent

    def _of_block(self, kind: str, **more: Any) -> bytes:
        return sent_event({"type": kind, "index": self._n_blocks, **more}, kind)

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": self.progress.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._stop_sequence if stop_reason else None,
            "usage": self._usage(),
        }

    @property
    def _stop_reason(self) -> str:
        if not self.progress.is_whole:
            return "max_tokens"
        if self.progress.calls:
            return "tool_use"
        return "stop_sequence" if self._stop_sequence else "end_turn"

    @property
    def _stop_sequence(self) -> str | None:
        end = self.progress.finished
        return end.stop_string if end is not None and end.stop_string in (self.parsed.request.stop or ()) else None

    def _usage(self) -> dict[str, Any]:
        timings, prompt = self.progress.timings, self.progress.prompt
        n_new = prompt.total - prompt.cache_n if prompt is not None else timings.prompt_n
        return {
            "input_tokens": n_new,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": timings.cache_n,
            "output_tokens": timings.predicted_n,
        }
