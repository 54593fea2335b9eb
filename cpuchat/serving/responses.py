"""OpenAI's /v1/responses, the stateless part: a request brings all items of its conversation, and nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from cpuchat.protocol.messages import Role, ToolCall
from cpuchat.serving.errors import Refusal
from cpuchat.serving.replies import BlockReply, WrittenCall, sent_event
from cpuchat.serving.requests import (
    Kind,
    ParsedRequest,
    RequestBody,
    RequestMessages,
    RequestReader,
    Unsupported,
    encoded,
    field_error,
    namespaced,
    quoted,
    read_call,
    read_choice,
    read_form,
    read_text,
    read_tools,
)

_NOT_STORED = "nothing is stored here; send all items in `input`"
_THOUGHTS = ("reasoning_text", "summary_text", "text")
_CUSTOM = "response.custom_tool_call_input"
_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ResponsesBody(RequestBody, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: Annotated[str | None, Unsupported(_NOT_STORED, ())] = None
    conversation: Annotated[Any, Unsupported(_NOT_STORED, ())] = None
    store: Annotated[bool | None, Unsupported(_NOT_STORED, (False,))] = None
    background: Annotated[bool | None, Unsupported(_NOT_STORED, (False,))] = None
    prompt: Annotated[Any, Unsupported("there are no stored prompts here", ())] = None
    truncation: Annotated[str | None, Unsupported("nothing is left out of a prompt", ("disabled",))] = None


def read_response(reader: RequestReader, data: bytes) -> ParsedRequest:
    """Read the body of a request. Raises Refusal."""
    body = reader.body(data, ResponsesBody)
    reader.check_number(() if isinstance(body.input, str) else body.input, "input")
    offered = read_tools(reader, body.tools or [], "responses")
    transcript = _Items(body.instructions or "").read(body.input)
    reasoning, effort = reader.reasoning((body.reasoning or {}).get("effort"), "reasoning.effort")
    form = (body.text or {}).get("format") or {"type": "text"}
    encoded([form, body.metadata, body.tool_choice], "metadata")
    asked = transcript.asked(
        offered,
        calling=read_choice(body.tool_choice, offered, single=body.parallel_tool_calls is False),
        grammar=read_form(form, "text.format"),
        reasoning=reasoning,
        effort=effort,
    )
    echoed = {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "reasoning": {"effort": effort or None, "summary": None},
        "text": {"format": form},
        "tool_choice": body.tool_choice or "auto",
    }
    return reader.parsed(body, asked, "input", offered=offered, max_tokens=body.max_output_tokens, echoed=echoed)


class _Items:
    """Turns items into messages: reasoning, text and calls that follow each other are one answer."""

    def __init__(self, instructions: str) -> None:
        self._found = RequestMessages()
        self._texts, self._thoughts, self._calls = list[str](), list[str](), list[ToolCall | str]()
        self._is_open = False  # an answer, to which these belong
        if instructions:
            self._found.add("system", instructions)

    def read(self, given: str | list[dict[str, Any]]) -> RequestMessages:
        """Return the messages. Raises Refusal."""
        if isinstance(given, str):
            self._found.add("user", given)
            return self._found
        for number, item in enumerate(given):
            self._take(item, f"input[{number}]")
        self._close()
        if not given or not self._found.messages:
            raise Refusal(400, "`input` is empty.", param="input")
        return self._found

    def _take(self, item: dict[str, Any], where: str) -> None:
        kind = str(item.get("type") or "message")
        if kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise field_error(f"{where}.role", f"only {', '.join(_ROLES)} are supported")
            content = "" if role == "assistant" and item.get("content") is None else item.get("content")
            text = read_text(content, f"{where}.content", between="")
            if role == "assistant":
                self._extend(text=text)
            else:
                self._close()
                self._found.add(role, text)
        elif kind == "reasoning":
            for key in ("content", "summary"):
                self._extend(reasoning=read_text(item.get(key) or "", f"{where}.{key}", _THOUGHTS))
        elif kind.endswith("_call_output"):
            self._close()
            output = item.get("output")
            plain = isinstance(output, str | None) or (isinstance(output, list) and kind in _TEXT_OUTPUTS)
            text = read_text(output or "", where, between="", of_tool=True) if plain else encoded(output, where)
            self._found.add_result(item.get("call_id") or item.get("id"), text)
        elif kind in _CALLS:
            arguments = item.get(_CALLS[kind])
            arguments = {"input": arguments} if kind == "custom_tool_call" else arguments or ""
            name = namespaced(str(item.get("namespace") or ""), str(item.get("name") or ""))
            self._extend(call=read_call(item.get("call_id") or item.get("id"), name, arguments, where))
        elif not kind.endswith(("_call", "_output")) and not kind.startswith("mcp_"):  # what ran elsewhere is left out
            reason = _NOT_STORED if kind == "item_reference" else f"`{quoted(kind)}` is not supported"
            raise field_error(f"{where}.type", reason, "unsupported")

    def _close(self) -> None:
        if self._is_open:
            self._found.add_answer("".join(self._texts), "\n".join(filter(None, self._thoughts)), self._calls)
        self._texts, self._thoughts, self._calls, self._is_open = [], [], [], False

    def _extend(self, text: str = "", reasoning: str = "", call: ToolCall | str = "") -> None:
        if self._calls and not call:  # another answer
            self._close()
        self._is_open = True
        self._texts.append(text)
        self._thoughts.append(reasoning)
        self._calls += [call] if call else []


_TEXT_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Calls that a client runs, and the field that has their arguments."""


class ResponsesReply(BlockReply):
    """An answer of /v1/responses: items of reasoning, text and calls."""

    id_prefix = "resp_"

    def __init__(self, model: str, fingerprint: str, parsed: ParsedRequest) -> None:
        super().__init__(model, fingerprint, parsed)
        self._sequence = 0
        self._items: list[dict[str, Any]] = []

    def whole(self) -> bytes:
        progress = self.progress
        for channel, text in (("reasoning", progress.reasoning), ("answer", progress.text)):
            if text:
                self._in_block(channel, text)
        for index, call in enumerate(progress.calls):
            self._in_block(index, call.arguments)
        self._ended()
        return msgspec.json.encode(self._response(self._status))

    def end(self) -> bytes:
        status = self._status
        return self._event(f"response.{status}", response=self._response(status))

    def failed(self, refusal: Refusal) -> bytes:
        return self._event("error", message=refusal.message, code=refusal.code, param=refusal.param)

    def _begun(self) -> bytes:
        response = self._response("in_progress")
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _started(self, kind: str | int) -> bytes:
        number = f"{self.progress.id.removeprefix(self.id_prefix)}{len(self._items)}"
        part: dict[str, Any] | None = None
        if isinstance(kind, int):
            call = self.progress.calls[kind]
            of = self._kind_of(call)
            named = "custom_tool_call" if of.type == "custom" else "function_call"
            item = {"type": named, "id": f"fc_{number}", "call_id": call.id, **of.item("")}
        elif kind == "reasoning":
            item = {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items.append({**item, "status": "in_progress"})
        added = self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])
        if part is None:
            return added
        self._items[-1]["content"].append(part)
        return added + self._event("response.content_part.added", **self._at, content_index=0, part=part)

    def _added(self, kind: str | int, text: str) -> bytes:
        item, at = self._items[-1], self._at
        if isinstance(kind, int):
            call, before = self.progress.calls[kind], item.get("input", "")
            item |= self._kind_of(call).item(call.arguments)
            if item["type"] == "custom_tool_call":
                item["input"] = max(before, item["input"], key=len)  # less can be read while an escape is cut
                return self._event(f"{_CUSTOM}.delta", **at, delta=item["input"][len(before) :])
            return self._event("response.function_call_arguments.delta", **at, delta=text)
        item["content"][0]["text"] += text
        where = {**at, "content_index": 0, "delta": text}
        if kind == "reasoning":
            return self._event("response.reasoning_text.delta", **where)
        return self._event("response.output_text.delta", **where, logprobs=[])

    def _closed(self, kind: str | int) -> bytes:
        item, at = self._items[-1], self._at
        is_cut = self.progress.finished is not None and not self.progress.is_whole
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "custom_tool_call":
            sent = self._event(f"{_CUSTOM}.done", **at, input=item["input"])
        elif item["type"] == "function_call":
            done = {**at, "name": item["name"], "arguments": item["arguments"]}
            sent = self._event("response.function_call_arguments.done", **done)
        else:
            part, at = item["content"][0], {**at, "content_index": 0}
            if kind == "reasoning":
                sent = self._event("response.reasoning_text.done", **at, text=part["text"])
            else:
                sent = self._event("response.output_text.done", **at, text=part["text"], logprobs=[])
            sent += self._event("response.content_part.done", **at, part=part)
        return sent + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _kind_of(self, call: WrittenCall) -> Kind:
        """Return what the tool of a call is to the client."""
        return self.parsed.offered.kinds.get(call.name, Kind(name=call.name))

    def _event(self, kind: str, **fields: Any) -> bytes:
        sent = sent_event({"type": kind, "sequence_number": self._sequence, **fields}, kind)
        self._sequence += 1
        return sent

    @property
    def _status(self) -> str:
        return "completed" if self.progress.is_whole else "incomplete"

    def _response(self, status: str) -> dict[str, Any]:
        request, timings, is_over = self.parsed.request, self.progress.timings, status != "in_progress"
        tools = [
            {"type": "custom", "name": one.name}
            if self.parsed.offered.kinds[one.name].type == "custom"
            else {"type": "function", **one.declaration()["function"], "strict": one.strict}
            for one in request.tools
        ]
        n_input = timings.cache_n + timings.prompt_n
        usage = {
            "input_tokens": n_input,
            "input_tokens_details": {"cached_tokens": timings.cache_n},
            "output_tokens": timings.predicted_n,
            "output_tokens_details": {"reasoning_tokens": self.progress.n_reasoning},
            "total_tokens": n_input + timings.predicted_n,
        }
        return {
            "id": self.progress.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "max_output_tokens": request.max_tokens or None,
            "model": self.model,
            "output": self._items if is_over else [],
            "parallel_tool_calls": not request.calling.single,
            "previous_response_id": None,
            "store": False,
            "temperature": request.sampling.temperature,
            "tools": tools,
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            "usage": usage if is_over else None,
            **self.parsed.echoed,
        }
