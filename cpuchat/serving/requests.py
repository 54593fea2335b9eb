"""One request, in whichever dialect (`openai_chat`, `responses`, `anthropic`): checked, and made a `Generate`.

Tools that a client runs itself but declares by a type in place of a schema (a shell, an editor) are offered to the
model as functions, with the schema of the vendor's guide. What the vendor would run, such as a web search, is left out.

Unknown fields are ignored, as by compatible servers: programs send many that change nothing here. What would change the
answer and is not supported is refused. `cache_salt` is vLLM's: requests reuse nothing of those with another one.
"""

from __future__ import annotations

import contextlib
import re
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import UsageError
from cpuchat.base.text import clean_line
from cpuchat.config.settings import SamplingSection, Settings, explained
from cpuchat.grammar.gbnf import check_grammar
from cpuchat.grammar.limits import LONGEST_FORM
from cpuchat.grammar.schema import schema_grammar
from cpuchat.protocol.messages import (
    EFFORTS,
    CallRule,
    Generate,
    Message,
    Output,
    Role,
    Speculation,
    StateKey,
    Tool,
    ToolCall,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.serving.errors import Refusal, field_error

BYTES_PER_TOKEN = 64
"""More text than this for each token of the context cannot fit; it is refused before the engine tokenizes it."""
PARSE_SECONDS = 5.0
"""A request must be read within, its schemas turned into grammars."""
MAX_STOPS, LONGEST_STOP = 16, 1000
STREAM_SECONDS, WHOLE_SECONDS = 0.08, 1.0
"""Between two events with text: of a stream, and where only the end is sent."""
_MAX_QUOTED = 80  # characters of a wrong value that an error repeats
TEXTS = ("text", "input_text", "output_text", "refusal")
"""Kinds of parts that are text, in OpenAI's dialects."""
_MAX_TOOLS = 512
_DEEPEST = 60
INT32 = (1 << 31) - 1
_BILLING = re.compile(
    r"\A\s*x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\s]*(?:;|(?=[ \t]*(?:\n|\Z))))+\s*", re.IGNORECASE
)
_NAME = re.compile(r"[\w.:-]{1,128}")
Dialect = Literal["chat", "responses", "messages"]


class Kind(NamedTuple):
    """What a tool is to its client: "custom" has one text. `name` and `namespace` are the client's."""

    type: Literal["function", "custom"] = "function"
    name: str = ""
    namespace: str = ""

    def item(self, arguments: str) -> dict[str, Any]:
        """Return what an item of a call has beside its ids, with arguments as JSON that may be cut."""
        if self.type == "custom":
            given: dict[str, Any] = {}
            for end in ("", '"}', "}"):  # it may be cut in its last text
                with contextlib.suppress(ValueError):
                    given = msgspec.json.decode(arguments + end, type=prepared(dict[str, Any]))
                    break
            return {"name": self.name, "input": str(given.get("input", ""))}
        return {"name": self.name, **({"namespace": self.namespace} if self.namespace else {}), "arguments": arguments}


@dataclass(frozen=True)
class Offered:
    """The tools of a request, what each is to the client, and the names and types of those that are left out."""

    tools: tuple[Tool, ...] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    left_out: frozenset[str] = frozenset()


_TEXT: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}


def _schema(required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {required: _TEXT} | properties, "required": [required]}


_RUN_BY_CLIENT: Final = {
    "bash": ("Runs a command in a shell that stays open.", _schema("command", restart={"type": "boolean"})),
    "text_editor": (
        "Views and changes files: command is view, create, str_replace or insert.",
        _schema(
            "command", path=_TEXT, file_text=_TEXT, old_str=_TEXT, new_str=_TEXT, insert_line=_INTEGER,
            insert_text=_TEXT, view_range={"type": "array", "items": _INTEGER},
        ),
    ),
}  # fmt: skip
"""By type, without its date: what the tool does, its schema."""


def declarations(one: Any, where: str, dialect: Dialect) -> Iterator[tuple[dict[str, Any], str, Kind | None]]:
    """Give the functions that a tool stands for, with their places; None: it is left out. Raises Refusal: no tool."""
    kind = one.get("type") or "function" if isinstance(one, dict) else ""
    plain = re.sub(r"_\d{8}$", "", str(kind))
    name = str(one.get("name") or plain) if isinstance(one, dict) else ""
    if dialect == "messages" and kind == "custom":
        yield one, where, Kind(name=name)
    elif kind == "function" or (kind == "custom" and dialect == "responses"):
        # Some clients mix the forms of both of OpenAI's dialects, and that of Anthropic's.
        inner, at = (one[kind], f"{where}.{kind}") if isinstance(one.get(kind), dict) else (one, where)
        found = Kind(kind, name=str(inner.get("name")))
        if kind == "custom":  # it takes a text
            form, about = inner.get("format"), [str(inner.get("description") or "")]
            if isinstance(form, dict) and "definition" in form:
                about.append(f"The input must match this grammar ({form.get('syntax')}):\n{form['definition']}")
            about = "\n\n".join(filter(None, about))
            inner = {"name": inner.get("name"), "description": about, "parameters": _schema("input")}
        yield inner, at, found
    elif kind == "namespace" and dialect == "responses" and isinstance(one.get("tools"), list):
        inside = (inner for inner in one["tools"] if not (isinstance(inner, dict) and inner.get("type") == kind))
        for number, inner in enumerate(inside):
            for function, at, found in declarations(inner, f"{where}.tools[{number}]", dialect):
                if found is not None:
                    function = {**function, "name": namespaced(name, found.name)}
                yield function, at, found and found._replace(namespace=name)
    elif plain in _RUN_BY_CLIENT:
        about, schema = _RUN_BY_CLIENT[plain]
        yield {"name": name, "description": about, "parameters": schema}, where, Kind(name=name)
    elif isinstance(kind, str) and kind:
        yield {"type": kind, "name": name}, where, None
    else:
        raise field_error(where, "a tool is an object with a `type`")


def namespaced(namespace: str, name: str) -> str:
    """Return the name under which the model sees a tool of a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


@dataclass(frozen=True)
class Unsupported:
    """Metadata of a field that is refused, because of `reason`, unless it is left out or has one of these values."""

    reason: str
    neutral: tuple[Any, ...]


class RequestBody(SamplingSection, kw_only=True, forbid_unknown_fields=False):
    """Fields that all dialects share; those of sampling have the bounds of the settings."""

    model: str | None = None
    stream: bool | None = None
    seed: Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)] | None = None  # type: ignore[assignment]
    top_k: int | None = None
    cache_salt: str | None = None


@cache
def _unsupported(kind: type[RequestBody]) -> dict[str, Unsupported]:
    """Return the fields of a body that are refused."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {name: one for name, hint in hints for one in get_args(hint) if isinstance(one, Unsupported)}


T = TypeVar("T", bound=RequestBody)


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A request that can be answered. A stream has timings `with_timings` in every chunk, and `with_progress` of the
    prompt; the answer repeats the `echoed` fields. Of one that is filled in only `fields` are sent (() all), and no
    text where it is `prompt_only`. `n` answers are wanted, this one is the `index`-th."""

    request: Generate
    stream: bool = False
    offered: Offered = Offered()
    with_usage: bool = False
    with_timings: bool = False
    with_progress: bool = False
    echoed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    fields: tuple[str, ...] = ()
    prompt_only: bool = False
    n: int = 1
    index: int = 0

    def choices(self) -> list[ParsedRequest]:
        """Return a request for each answer; those with a seed get one of their own."""
        sampling, found = self.request.sampling, list[ParsedRequest]()
        for index in range(self.n):
            seed = None if sampling.seed is None else (sampling.seed + index) % (1 << 63)
            request = msgspec.structs.replace(self.request, sampling=msgspec.structs.replace(sampling, seed=seed))
            found.append(replace(self, request=request, index=index))
        return found

    def of_client(self, client: str) -> ParsedRequest:
        """Return it as a request of `client`, which reuses nothing of what was evaluated for others."""
        key = msgspec.structs.replace(self.request.state, owner=f"{client} {self.request.state.owner}")
        return replace(self, request=msgspec.structs.replace(self.request, state=key))


class RequestReader:
    """Reads requests for one model. `settings` are for what they leave out; `note` takes what the log says once."""

    def __init__(
        self,
        names: Sequence[str],
        model: ModelInfo,
        settings: Settings,
        speculation: Speculation,
        *,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._names, self._model, self._speculation = names, model, speculation
        self.n_ctx, self.settings, self.note = model.n_ctx, settings, note

    @property
    def max_body(self) -> int:
        """Return the bytes of a body beyond which its text cannot fit into the context."""
        return 2 * LONGEST_FORM + 2 * BYTES_PER_TOKEN * self.n_ctx

    def body(self, data: bytes, kind: type[T]) -> T:
        """Decode a body. Raises Refusal: it is not valid, or asks for what is not supported."""
        body = _decoded(data, kind)
        if body.model and body.model not in self._names:
            self.note(f"{self._names[0]} answers requests for models that are not served.")
        for name, one in _unsupported(type(body)).items():
            if getattr(body, name) not in (None, *one.neutral):
                raise field_error(name, one.reason, "unsupported")
        return body

    def require_fill_in(self, status: int, param: str | None = None) -> None:
        """Refuse to fill in the middle of a text with a model that has no tokens for it. Raises Refusal."""
        if not self._model.fills_in:
            what = f"{self._names[0]} cannot fill in the middle of a text: its vocabulary has no tokens for that."
            message = f"{what} Load a model that was trained for it, such as Qwen2.5 Coder."
            raise Refusal(status, message, "unsupported", param=param)

    def check_number(self, given: Sized, param: str = "messages") -> None:
        """Refuse more messages than can fit: a template writes a token or more for each. Raises Refusal."""
        if len(given) > self.n_ctx:
            raise self._too_long(f"{len(given):,} messages", param)

    def check_length(self, param: str, texts: Iterable[str]) -> None:
        """Refuse what is not valid Unicode, or so long that it cannot fit. Raises Refusal."""
        try:
            n_bytes = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError:
            raise Refusal(400, f"`{param}` contains an unpaired surrogate.", param=param) from None
        if n_bytes > BYTES_PER_TOKEN * self.n_ctx:
            raise self._too_long(f"{n_bytes:,} bytes", param)

    def _too_long(self, size: str, param: str) -> Refusal:
        message = f"The prompt has {size}, but the context holds only {self.n_ctx:,} tokens."
        return Refusal(400, message, "context_length_exceeded", param=param, more={"n_ctx": self.n_ctx})

    def parsed(
        self,
        body: RequestBody,
        asked: Generate,
        param: str = "messages",
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        reasoning_budget: int | None = None,
        **more: Any,
    ) -> ParsedRequest:
        """Return the request with what the settings decide, None: all. `param` has its text, `more` is as of
        `ParsedRequest`. Raises Refusal."""
        messages = _without_billing(asked.messages)
        texts = [asked.prompt or ""]
        for one in messages:
            texts += (one.content, one.reasoning, *(encoded(call.arguments, "messages") for call in one.calls))
        if asked.fill is not None:
            texts += (asked.fill.suffix, *chain.from_iterable(asked.fill.files))
        self.check_number(messages, param)
        self.check_length(param, texts)
        self.check_length("tools", [encoded(tool.declaration(), "tools") for tool in asked.tools])
        budget = self.settings.chat.request_options()["reasoning_budget"]
        if reasoning_budget is not None:
            if reasoning_budget < -1:
                raise field_error("reasoning_budget_tokens", f"must be -1 or more, not {reasoning_budget}")
            budget = None if reasoning_budget == -1 else min(reasoning_budget, self.n_ctx)  # -1: "no limit", as there
        limit = self.settings.chat.max_tokens
        if max_tokens is not None:
            if max_tokens < 1 and max_tokens != -1:
                raise field_error("max_tokens", f"must be at least 1, not {max_tokens}")
            limit = max(min(max_tokens, self.n_ctx), 0)
        if body.top_k is not None and body.top_k < -1:
            raise field_error("top_k", "expected `int` >= 0")
        values = msgspec.structs.asdict(self.settings.sampling)
        values |= {name: given for name in values if (given := getattr(body, name)) is not None}
        for name in ("top_k", "repeat_last_n"):
            if values[name] is not None:
                values[name] = max(min(values[name], INT32), 0)  # -1 is "off" in other servers
        request = msgspec.structs.replace(
            asked,
            messages=messages,
            sampling=SamplingSection(**values).sampling(),
            max_tokens=limit,
            stop=_stops(stop),
            speculation=self._speculation,
            when_full="refuse",
            reasoning_budget=budget,
            output=Output(
                frame_seconds=STREAM_SECONDS if body.stream else WHOLE_SECONDS,
                unsplit=asked.prompt is not None,
                streams_calls=bool(asked.tools),
            ),
            # A salt is for one session, often.
            state=StateKey(owner=body.cache_salt or "", on_disk=not body.cache_salt),
        )
        return ParsedRequest(request=request, stream=bool(body.stream), **more)

    def reasoning(self, effort: Any, param: str) -> tuple[bool | None, str]:
        """Return `Generate.reasoning` and `Generate.effort` for an effort, None for none given. Raises Refusal."""
        if effort is None:
            return self.settings.chat.request_options()["reasoning"], ""
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise field_error(param, f"`{quoted(str(effort))}` is not one of {', '.join(EFFORTS)}")
        if not self._model.takes_effort:
            words = "`none` asks for no reasoning, other words for reasoning"
            self.note(f"The chat template of {self._names[0]} takes no effort of reasoning: {words}.")
        return effort != "none", effort


def _without_billing(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return messages without the line that Claude Code bills by: different each time, it would end all reuse."""
    n_system = next((at for at, one in enumerate(messages) if one.role != "system"), len(messages))
    head = [msgspec.structs.replace(one, content=_BILLING.sub("", one.content)) for one in messages[:n_system]]
    kept = (new for new, old in zip(head, messages, strict=False) if new.content or not old.content)
    return (*kept, *messages[n_system:]) or messages


def read_form(form: dict[str, Any] | None, param: str, *, also: str = "") -> str:
    """Return the grammar of a form as all dialects declare it, "" for any text. Raises Refusal."""
    match form or {"type": "text"}:
        case {"type": "text"}:
            return ""
        case {"type": "json_object" | "json_schema", "schema": dict(schema)}:  # the former llama-server's
            return answer_grammar(param, schema, also=also)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return answer_grammar(param, schema, also=also)
        case {"type": "json_object"}:
            return answer_grammar(param, {"type": "object"}, also=also)
        case {"type": "json_schema"}:
            raise field_error(param, "its `schema` is missing")
    raise field_error(param, "only text, json_object and json_schema are supported", "unsupported")


def answer_grammar(param: str, schema: Any, grammar: str = "", *, also: str = "") -> str:
    """Return the grammar of answers of the form in the field `param`: a schema, or a `grammar` in GBNF. `also`: another
    field that tells where the answer ends, or what it is. Raises Refusal."""
    if also:
        raise field_error(also, f"`{param}` decides what the answer is, and where it ends")
    if len(grammar or encoded(schema, param)) > LONGEST_FORM:
        raise field_error(param, f"larger than {LONGEST_FORM:,} bytes", "unsupported")
    try:
        if grammar:
            check_grammar(grammar, param)
            return grammar
        return schema_grammar(schema, param)
    except UsageError as error:
        reason = clean_line(f"{error.message} {error.hint}".strip())[: 5 * _MAX_QUOTED]
        raise Refusal(400, reason, "invalid_grammar", param=param) from None


def too_slow() -> Refusal:
    """Return what refuses a request whose schemas take too long."""
    message = f"Reading the request took longer than {PARSE_SECONDS:.0f} seconds. Send smaller schemas."
    return Refusal(400, message, "unsupported")


def read_tools(reader: RequestReader, given: Iterable[Any], dialect: Dialect) -> Offered:
    """Return the tools that a client declares; what runs elsewhere is left out. Raises Refusal."""
    tools, kinds, left_out = dict[str, Tool](), dict[str, Kind](), set[str]()
    end = time.monotonic() + PARSE_SECONDS
    for number, one in enumerate(given):
        for function, where, kind in declarations(one, f"tools[{number}]", dialect):
            if kind is None:
                left_out |= {function["type"], function["name"]}
                reader.note(f"Tools of the type {quoted(function['type'])} run elsewhere and are left out.")
                continue
            name, about, strict = function.get("name"), function.get("description"), bool(function.get("strict"))
            schema = function.get("parameters", function.get("input_schema"))
            schema = {"type": "object", "properties": {}} if schema is None else schema
            if not isinstance(name, str) or _NAME.fullmatch(name) is None:
                raise field_error(f"{where}.name", "must be 1 to 128 letters, digits, `_`, `-`, `.` or `:`")
            if name in tools:
                raise field_error(f"{where}.name", f"`{quoted(name)}` is there twice")
            if len(tools) >= _MAX_TOOLS:
                raise field_error("tools", f"more than {_MAX_TOOLS} are not supported", "unsupported")
            if not isinstance(schema, dict) or is_deep(schema):
                reason = f"must be a JSON schema of at most {_DEEPEST} levels, with 64-bit integers"
                raise field_error(f"{where}.parameters", reason)
            if strict:
                if time.monotonic() > end:
                    raise too_slow()
                answer_grammar(f"{where}.parameters", schema)
            about = about if isinstance(about, str) else ""
            tools[name], kinds[name] = Tool(name=name, description=about, parameters=schema, strict=strict), kind
    return Offered(tuple(tools.values()), kinds, frozenset(left_out))


def read_choice(choice: Any, offered: Offered, *, single: bool) -> CallRule:
    """Return what OpenAI's `tool_choice` lets the model call, in the form of chats or of responses. Raises Refusal."""
    chosen: Any = "auto" if choice in (None, "") else choice
    match chosen:
        case str(mode) | {"type": "auto" | "none" | "required" | "any" as mode}:
            return read_rule(mode, (), offered, single=single)
        case {"type": "allowed_tools"}:
            raise field_error("tool_choice", "`allowed_tools` is not supported; send these tools only", "unsupported")
        case {"type": str(kind)}:
            inner = chosen.get(kind)
            name = str((inner if isinstance(inner, dict) else chosen).get("name") or kind)  # the type is all, of some
            if name != "function":
                return read_rule("required", (name,), offered, single=single)
    raise field_error("tool_choice", "must be auto, none, required, or a tool by name")


def read_rule(mode: str, names: Sequence[str], offered: Offered, *, single: bool) -> CallRule:
    """Return what may be called: `mode` as of `CallRule`, or one tool by name. Raises Refusal."""
    mode = "required" if mode == "any" else mode  # Mistral's word
    known, own = offered.kinds, {kind.name: name for name, kind in offered.kinds.items()}
    names = [name if name in known else own.get(name, name) for name in names]
    for name in names:
        if name not in known and name in offered.left_out:
            raise field_error("tool_choice", f"`{quoted(name)}` runs elsewhere, not here", "unsupported")
        if name not in known:
            raise field_error("tool_choice", f"there is no tool `{quoted(name)}`")
    if mode == "required" and not known:
        why = "all of them run elsewhere" if offered.left_out else "there are no tools"
        raise field_error("tool_choice", why)
    if mode == "auto" or mode == "required" or mode == "none":
        return CallRule(mode=mode, names=tuple(dict.fromkeys(names)), single=single)
    raise field_error("tool_choice", f"`{quoted(mode)}` is not supported", "unsupported")


def read_call(id: Any, name: Any, arguments: Any, where: str) -> ToolCall | str:
    """Return a call of an earlier answer; its arguments may be JSON in a string. One that was cut, so that they are no
    JSON object, is returned as the text that the model wrote. Raises Refusal."""
    if not isinstance(name, str) or not name or not isinstance(id, str | None):
        raise field_error(where, "a call needs an id and a name")
    written = arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments.encode("utf-8", "replace")) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if isinstance(arguments, dict) and not is_deep(arguments):
        return ToolCall(id=id or "", name=name, arguments=arguments)
    if not isinstance(written, str):
        raise field_error(where, "the arguments must be a JSON object")
    return f'<tool_call>\n{{"name": {encoded(name, where)}, "arguments": {written}'


class RequestMessages:
    """The messages of a request so far. A result belongs to the latest call with its id that has none yet."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._waiting: dict[str, list[ToolCall]] = {}  # the one that comes next is the last
        self._answered: dict[str, ToolCall] = {}

    def add(self, role: Role, content: str) -> None:
        self.messages.append(Message(role=role, content=content))

    def add_answer(self, content: str, reasoning: str = "", calls: Sequence[ToolCall | str] = ()) -> None:
        """Add an answer; calls that were cut are text."""
        content = "\n".join(filter(None, (content, *(one for one in calls if isinstance(one, str)))))
        whole = tuple(one for one in calls if isinstance(one, ToolCall))
        self.messages.append(Message(role="assistant", content=content, reasoning=reasoning, calls=whole))
        for call in reversed(whole):
            self._waiting.setdefault(call.id, []).append(call)

    def add_result(self, id: Any, content: str) -> None:
        """Add what a call returned; without its call, it is a result of no tool."""
        id = id if isinstance(id, str) else ""
        if waiting := self._waiting.get(id):
            self._answered[id] = waiting.pop()
        call = self._answered.get(id)
        self.messages.append(Message(role="tool", content=content, call_id=id, tool=call.name if call else ""))

    def asked(self, offered: Offered, **more: Any) -> Generate:
        """Return the request to answer them; `more` is as of `Generate`."""
        last = self.messages[-1]
        continues = last.role == "assistant" and not last.calls  # the model goes on writing its text
        return Generate(messages=tuple(self.messages), continues=continues, tools=offered.tools, **more)


def read_text(
    content: Any, where: str, kinds: Collection[str] = TEXTS, between: str = "\n", *, of_tool: bool = False
) -> str:
    """Return a text, or the texts of parts of these `kinds`. `of_tool`: of a result, which the client sends again with
    every later request; what is no text in it is left out, and the model told so. Raises Refusal."""
    if isinstance(content, str):
        return content
    texts = list[str]()
    for part in content if isinstance(content, list) else [content]:
        match part:
            case {"type": str(kind), "text": str(text)} | {"type": "refusal" as kind, "refusal": str(text)} if (
                kind in kinds
            ):
                texts.append(text)
            case {"type": str(kind)} if of_tool:
                texts.append(f"[A part of the type {quoted(kind)} is left out: only text is read here.]")
            case {"type": str(kind)}:
                raise field_error(where, f"only text is supported, not `{quoted(kind)}`", "unsupported")
            case _:
                raise field_error(where, "must be text or parts of text")
    return between.join(texts)


def is_deep(value: Any, left: int = _DEEPEST) -> bool:
    """Return whether a value of JSON is nested too deeply for templates, or has an integer of more than 64 bits."""
    if isinstance(value, int):
        return not -(1 << 63) <= value < 1 << 64
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return not left or any(is_deep(one, left - 1) for one in inside)


def encoded(value: Any, param: str) -> str:
    """Return a value as JSON. Raises Refusal, which names its field."""
    try:
        return msgspec.json.encode(value).decode()
    except (ValueError, RecursionError):
        raise Refusal(400, f"`{param}` contains an unpaired surrogate.", param=param) from None


def quoted(value: str) -> str:
    """Return a client's value for an error message: one short line."""
    return clean_line(value[: 4 * _MAX_QUOTED])[:_MAX_QUOTED]


def _decoded(data: bytes, kind: type[T]) -> T:
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


def _stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = tuple(stop for stop in ([given] if isinstance(given, str) else given or ()) if stop)
    if len(stops) > MAX_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        raise field_error("stop", f"more than {MAX_STOPS} strings of {LONGEST_STOP:,} characters are not supported")
    encoded(stops, "stop")
    return stops
