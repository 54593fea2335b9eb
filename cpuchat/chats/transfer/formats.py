"""Chats outside the database: the document of an export, and what the exports of other programs become.

A document is a JSON object: `format` "cpuchat-chats", `version` 1, and `chats`. Times are seconds since the epoch.
Messages are numbered from 1 within their chat, `parent` 0 is its beginning: a chat gives the same document from any
database.

Read are also ChatGPT's data export, the exports of llama-server's web UI, and LM Studio's conversations. Their trees of
messages become branches. What has no text leaves a mark in brackets: images and files. What these programs hide from
their users, calls of tools and their results are left out, except code that ChatGPT ran and its output.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.chats.records import Chat, StoredMessage, Tree, title_of
from cpuchat.config.presets import StoredPreset
from cpuchat.protocol.timings import Timings

VERSION = 1


class PortableChat(Chat, frozen=True, kw_only=True, omit_defaults=True):
    """A chat with the messages of all its branches, without `version` and `chat_id`. `id` "": it comes from another
    program. What a later version chose is read as it is, and checked when it is stored.
    """

    when_full: str = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    preset: StoredPreset | None = None
    reasoning: str = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    messages: list[StoredMessage] = []

    @property
    def digest(self) -> str:
        """Return an id for what was said in it, the same each time it is read."""
        said = [(one.id, one.parent, one.role, one.content, one.reasoning) for one in self.messages]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    @property
    def branch(self) -> list[StoredMessage]:
        """Return the messages of the open branch."""
        path = set(self.tree.path(self.tree.leaf))
        return [message for message in self.messages if message.id in path]

    @property
    def tree(self) -> Tree:
        return Tree(((message.id, message.parent) for message in self.messages), self.leaf)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal["cpuchat-chats"] = "cpuchat-chats"
    version: int = VERSION
    chats: list[PortableChat] = []


def portable_chat(chat: Chat, messages: Sequence[StoredMessage]) -> PortableChat:
    """Return a stored chat with these messages, which are all that it has, oldest first."""
    tree = Tree((message.id, message.parent) for message in messages)
    number = {0: 0} | {message.id: at for at, message in enumerate(messages, 1)}
    numbered = [
        msgspec.structs.replace(one, id=number[one.id], parent=number[tree.parent(one.id)], chat_id="")
        for one in messages
    ]
    fields = msgspec.structs.asdict(chat) | {"version": 0, "leaf": number.get(chat.leaf or -1), "messages": numbered}
    return PortableChat(**fields)


def encoded(chats: Iterable[PortableChat]) -> bytes:
    """Return the document, indented and with a line break at its end."""
    return msgspec.json.format(msgspec.json.encode(Document(chats=list(chats))), indent=1) + b"\n"


_MOST_CHARACTERS = 100_000_000  # of a chat; branches repeat what they share of an answer
_PART_CHARACTERS = 50  # that a part counts for beside its own


@dataclass
class Node:
    """A node. `parent` is the key of the one before, None or a missing one for a root.

    `message` None: what follows it follows the message before it, as after the result of a tool.
    """

    parent: str | None
    message: StoredMessage | None
    created: float = 0.0


@dataclass
class _Turn:
    """One side's messages without a break, on one branch: `earlier`, then `message`. `id` None: not needed yet."""

    before: _Turn | None = None
    message: StoredMessage | None = None
    id: int | None = None
    earlier: _Turn | None = None


@dataclass
class _Branches:
    messages: list[StoredMessage] = field(default_factory=list)
    room: int = _MOST_CHARACTERS

    def add(self, turn: _Turn) -> int:
        """Return the number of the turn's message, which follows that of the turn before."""
        if turn.id is None:
            assert turn.before is not None and turn.before.id is not None
            turn.id = len(self.messages) + 1
            self.messages.append(msgspec.structs.replace(self._joined(turn), id=turn.id, parent=turn.before.id))
        return turn.id

    def _joined(self, turn: _Turn) -> StoredMessage:
        """Return the messages of a turn as one: each branch out of the middle of an answer has all before it."""
        parts: list[StoredMessage] = []
        last: _Turn | None = turn
        while last is not None:
            assert last.message is not None
            parts.append(last.message)
            self.room -= _PART_CHARACTERS + len(last.message.content) + len(last.message.reasoning)
            if self.room < 0:
                raise ValueError(f"its branches have more than {_MOST_CHARACTERS / 1e6:.0f} million characters")
            last = last.earlier
        parts.reverse()
        if len(parts) == 1:
            return parts[0]
        return msgspec.structs.replace(
            parts[-1],
            content=paragraphs(part.content for part in parts),
            reasoning=paragraphs(part.reasoning for part in parts),
            model=next((part.model for part in reversed(parts) if part.model), ""),
            created=parts[0].created,
        )

    def follow(self, turn: _Turn, message: StoredMessage) -> _Turn:
        """Return the turn that `message` is in: an answer in several parts is one message."""
        if turn.message is not None and turn.message.role == message.role == "assistant":
            return _Turn(turn.before, message, earlier=turn)
        self.add(turn)
        return _Turn(turn, message)


def branches(nodes: Mapping[str, Node], current: str | None) -> tuple[list[StoredMessage], int | None]:
    """Return the messages of a tree, numbered, and the end of the branch with the node `current`, if it is one.

    Siblings are in the order of their times. Raises ValueError for more text than `_MOST_CHARACTERS`.
    """
    children: dict[str | None, list[str]] = {}
    for key, node in nodes.items():
        children.setdefault(node.parent if node.parent in nodes else None, []).append(key)
    for keys in children.values():
        keys.sort(key=lambda key: nodes[key].created)
    found = _Branches()
    ends: dict[str, _Turn] = {}
    left = [(key, _Turn(id=0)) for key in reversed(children.get(None, []))]
    while left:  # a circle is not reached from a root
        key, turn = left.pop()
        message = nodes[key].message
        ends[key] = turn = turn if message is None else found.follow(turn, message)
        below = children.get(key, [])
        if not below:
            found.add(turn)
        left += [(child, turn) for child in reversed(below)]
    leaf = ends[current].id if current in ends else None
    return found.messages, leaf or None


def imported_chat(
    messages: list[StoredMessage], leaf: int | None, *, title: str | None, created: float, updated: float,
    model: str = "", system_prompt: str = "",
) -> PortableChat:  # fmt: skip
    """Return the chat; its title is that of its first question unless given."""
    question = next((message.content for message in messages if message.role == "user"), "")
    return PortableChat(
        title=(title or "").strip() or title_of(question),
        created=created or updated,
        updated=updated or created,
        model=model or next((message.model for message in reversed(messages) if message.model), ""),
        system_prompt=system_prompt,
        leaf=leaf,
        messages=messages,
    )


def paragraphs(parts: Iterable[str]) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())


_Object = dict[str, Any]


def _named(value: _Object | None, key: str) -> str:
    """Return a text of an object; "" where there is none."""
    found = (value or {}).get(key)
    return found if isinstance(found, str) else ""


class _Thought(msgspec.Struct):
    summary: str | None = None
    content: str | None = None


class _Content(msgspec.Struct):
    content_type: str = "text"
    parts: list[Any] | None = None
    text: str | None = None
    language: str | None = None
    thoughts: list[_Thought] | None = None


class _Message(msgspec.Struct):
    author: _Object
    content: _Content
    create_time: float | None = None
    metadata: _Object | None = None
    recipient: str | None = None


class _Node(msgspec.Struct):
    message: _Message | None = None
    parent: str | None = None


class ChatGPTConversation(msgspec.Struct):
    """One conversation, as far as it is read."""

    mapping: dict[str, _Node]
    title: str | None = None
    create_time: float | None = None
    update_time: float | None = None
    current_node: str | None = None
    default_model_slug: str | None = None


def read_chatgpt(value: object) -> PortableChat:
    """Return a conversation of `conversations.json`, whose messages are a tree, as a chat. Summaries of reasoning are
    taken, custom instructions are not. Raises msgspec.ValidationError.
    """
    one = msgspec.convert(value, prepared(ChatGPTConversation))
    nodes = {key: _node(node) for key, node in one.mapping.items()}
    messages, leaf = branches(nodes, one.current_node)
    system = (
        node.message.content for node in one.mapping.values()
        if node.message is not None and _named(node.message.author, "role") == "system"
        and not _is_hidden(node.message)
    )  # fmt: skip
    return imported_chat(
        messages, leaf, title=one.title, created=one.create_time or 0.0, updated=one.update_time or 0.0,
        model=one.default_model_slug or "", system_prompt=paragraphs(map(_text, system)),
    )  # fmt: skip


def _is_hidden(message: _Message) -> bool:
    return bool((message.metadata or {}).get("is_visually_hidden_from_conversation"))


def _node(node: _Node) -> Node:
    message = node.message
    if message is None:
        return Node(node.parent, None)
    created = message.create_time or 0.0
    role = _named(message.author, "role")
    is_output = role == "tool" and message.content.content_type == "execution_output"
    is_said = role in ("user", "assistant") and message.recipient in (None, "all", "python")
    if _is_hidden(message) or not (is_said or is_output):
        return Node(node.parent, None, created)
    content, reasoning = _text(message.content), _reasoning(message.content)
    if not (content or reasoning):
        return Node(node.parent, None, created)
    if role == "user":
        return Node(node.parent, StoredMessage(role="user", content=content, created=created), created)
    answer = StoredMessage(
        role="assistant", content=content, reasoning=reasoning, model=_named(message.metadata, "model_slug"),
        stop_reason="end", created=created,
    )  # fmt: skip
    return Node(node.parent, answer, created)


def _text(content: _Content) -> str:
    match content.content_type:
        case "text" | "multimodal_text":
            return paragraphs(map(_part, content.parts or []))
        case "code":
            language = "" if content.language in (None, "unknown") else content.language
            return f"```{language}\n{content.text or ''}\n```" if content.text else ""
        case "execution_output":
            return f"```\n{content.text}\n```" if content.text else ""
        case _:
            return ""


def _part(part: object) -> str:
    match part:
        case str():
            return part
        case {"text": str(text)}:
            return text
        case {"content_type": str(kind)}:
            return f"[{kind.partition('_')[0]}]"
        case _:
            return ""


def _reasoning(content: _Content) -> str:
    return paragraphs(text or "" for one in content.thoughts or [] for text in (one.summary, one.content))


_REASONING = "<<<reasoning_content_start>>>", "<<<reasoning_content_end>>>"
_TOOL_CALLS = "<<<AGENTIC_TOOL_CALL_START>>>", "<<<AGENTIC_TOOL_CALL_END>>>"

_Key = str | int


class _Timings(msgspec.Struct):
    cache_n: float | None = None
    prompt_n: float | None = None
    prompt_ms: float | None = None
    predicted_n: float | None = None
    predicted_ms: float | None = None


class _Extra(msgspec.Struct):
    type: str = ""
    name: str = ""
    content: str | None = None


class _LlamaServerMessage(msgspec.Struct, rename="camel"):
    role: str
    content: str | None = None
    id: _Key | None = None
    parent: _Key | None = None
    type: str | None = None
    timestamp: float | None = None
    thinking: str | bool | None = None
    reasoning_content: str | None = None
    model: str | None = None
    timings: _Timings | None = None
    extra: list[_Extra] | None = None


class _Conversation(msgspec.Struct, rename="camel"):
    name: str | None = None
    last_modified: float | None = None
    curr_node: _Key | None = None


class _Export(msgspec.Struct):
    conv: _Conversation
    messages: list[_LlamaServerMessage]


def sessions(records: Iterable[object]) -> list[object]:
    """Return the conversations of an export with one record per line, as `read` takes them."""
    found: list[Any] = []
    for record in records:
        match record:
            case {"type": "session"}:
                found.append({"conv": record, "messages": []})
            case {"type": "message", "message": message} if found:
                found[-1]["messages"].append(message)
            case _:
                pass  # of a later version
    return found


def read_llama_server(value: object) -> PortableChat:
    """Return a conversation of the export as a chat. Raises msgspec.ValidationError."""
    if isinstance(value, dict) and "conv" not in value:
        value = {"conv": {name: value.get(name) for name in ("name", "lastModified")}, "messages": value["messages"]}
    one = msgspec.convert(value, prepared(_Export))
    nodes: dict[str, Node] = {}
    system: list[str] = []
    before: str | None = None
    for number, message in enumerate(one.messages):
        key = f"{number}." if message.id is None else str(message.id)
        is_linear = message.parent is None and message.type != "root"
        created = (message.timestamp or 0.0) / 1e3
        nodes[key] = Node(before if is_linear else str(message.parent), _portable(message, created), created)
        before = key
        if message.role == "system" and message.type != "root":
            system.append(message.content or "")
    current = None if one.conv.curr_node is None else str(one.conv.curr_node)
    messages, leaf = branches(nodes, current)
    times = [node.created for node in nodes.values() if node.created]
    updated = (one.conv.last_modified or 0.0) / 1e3
    return imported_chat(
        messages, leaf, title=one.conv.name, system_prompt=next(filter(str.strip, system), ""),
        created=min(times, default=updated), updated=updated or max(times, default=0.0),
    )  # fmt: skip


def _portable(message: _LlamaServerMessage, created: float) -> StoredMessage | None:
    content = message.content or ""
    if message.type == "root" or message.role not in ("user", "assistant"):
        return None
    if message.role == "user":
        text = paragraphs([content, *map(_attachment, message.extra or [])])
        return StoredMessage(role="user", content=text, created=created)
    said, inline = _divided(content, *_REASONING)
    *before_calls, last = _divided("".join(said), *_TOOL_CALLS)[0]
    thinking = message.thinking if isinstance(message.thinking, str) else ""
    return StoredMessage(
        role="assistant",
        content="".join([*(text.rstrip("\n") for text in before_calls), last]).strip("\n"),
        reasoning=message.reasoning_content or thinking or paragraphs(inline),
        model=message.model or "",
        stop_reason="end",
        timings=_timings(message.timings),
        created=created,
    )


def _divided(text: str, opening: str, closing: str) -> tuple[list[str], list[str]]:
    """Return the parts outside of the marks, one more than inside, and those inside; linear in the text's length."""
    outside, inside, at = [], [], 0
    while (opened := text.find(opening, at)) >= 0 and (closed := text.find(closing, opened + len(opening))) >= 0:
        outside.append(text[at:opened])
        inside.append(text[opened + len(opening) : closed])
        at = closed + len(closing)
    return [*outside, text[at:]], inside


def _attachment(extra: _Extra) -> str:
    if extra.content:
        return f"{extra.name}:\n```\n{extra.content}\n```"
    return f"[{extra.name or extra.type}]"


def _timings(told: _Timings | None) -> Timings | None:
    """Return the figures; the first token is taken to come when the prompt is read."""
    if told is None or not told.predicted_n:
        return None
    figures: dict[str, Any] = {name: value or 0 for name, value in msgspec.structs.asdict(told).items()}
    counts: dict[str, Any] = {name: int(value) for name, value in figures.items() if name.endswith("_n")}
    return Timings(**figures | counts, ttft_ms=told.prompt_ms or 0.0)


_STOP_REASONS = {
    "userStopped": "cancelled",
    "maxPredictedTokensReached": "max_tokens",
    "contextLengthReached": "context",
    "stopStringFound": "stop_string",
}


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    name: str | None = None


class _Stats(msgspec.Struct, rename="camel"):
    stop_reason: str | None = None
    tokens_per_second: float | None = None
    time_to_first_token_sec: float | None = None
    prompt_tokens_count: float | None = None
    predicted_tokens_count: float | None = None


class _Generation(msgspec.Struct, rename="camel"):
    identifier: str | None = None
    stats: _Stats | None = None


class _Step(msgspec.Struct, rename="camel"):
    type: str = ""
    content: list[_Part] | None = None
    style: _Object | None = None
    gen_info: _Generation | None = None


class _Version(msgspec.Struct, rename="camel"):
    role: str = ""
    content: list[_Part] | str | None = None
    steps: list[_Step] | None = None
    sender_info: _Object | None = None


class _LmStudioMessage(msgspec.Struct, rename="camel"):
    versions: list[_Version]
    currently_selected: int = 0


class _Field(msgspec.Struct):
    key: str = ""
    value: Any = None


class _Config(msgspec.Struct):
    fields: list[_Field] | None = None


class LMStudioConversation(msgspec.Struct, rename="camel"):
    """One conversation, as far as it is read. Times in milliseconds."""

    messages: list[_LmStudioMessage]
    name: str | None = None
    created_at: float | None = None
    user_last_messaged_at: float | None = None
    assistant_last_messaged_at: float | None = None
    system_prompt: str | None = None
    last_used_model: _Object | None = None
    per_chat_prediction_config: _Config | None = None


def read_lm_studio(value: object) -> PortableChat:
    """Return a conversation as a chat. Raises msgspec.ValidationError."""
    one = msgspec.convert(value, prepared(LMStudioConversation))
    created = (one.created_at or 0.0) / 1e3
    messages: list[StoredMessage] = []
    system: list[str] = [one.system_prompt or ""]
    parent = 0
    for message in one.messages:
        below = parent
        for index, version in enumerate(message.versions):
            if version.role == "system":
                system.append(_lm_studio_text(version.content))
            elif said := _lm_studio_portable(version, created):
                messages.append(msgspec.structs.replace(said, id=len(messages) + 1, parent=parent))
                if index == message.currently_selected or below == parent:
                    below = len(messages)
        parent = below
    fields = one.per_chat_prediction_config.fields or [] if one.per_chat_prediction_config is not None else []
    system += [str(one.value or "") for one in fields if one.key == "llm.prediction.systemPrompt"]
    updated = max(one.user_last_messaged_at or 0.0, one.assistant_last_messaged_at or 0.0) / 1e3
    return imported_chat(
        messages, parent or None, title=one.name, created=created, updated=updated,
        model=_named(one.last_used_model, "identifier"), system_prompt=next(filter(str.strip, system), ""),
    )  # fmt: skip


def _lm_studio_portable(version: _Version, created: float) -> StoredMessage | None:
    if version.role == "user":
        return StoredMessage(role="user", content=_lm_studio_text(version.content), created=created)
    if version.role != "assistant":
        return None
    steps = [step for step in version.steps or [] if step.type == "contentBlock"]
    thought = [step for step in steps if _named(step.style, "type") == "thinking"]
    generations = [step.gen_info for step in steps if step.gen_info is not None]
    last = generations[-1] if generations else _Generation()
    stats = last.stats or _Stats()
    return StoredMessage(
        role="assistant",
        content=paragraphs(
            _lm_studio_text(one.content) for one in (version, *steps) if not any(one is step for step in thought)
        ),
        reasoning=paragraphs(_lm_studio_text(step.content) for step in thought),
        model=last.identifier or _named(version.sender_info, "senderName"),
        stop_reason=_STOP_REASONS.get(stats.stop_reason or "", "end"),
        timings=_lm_studio_timings(stats),
        created=created,
    )


def _lm_studio_text(content: list[_Part] | str | None) -> str:
    """Join the parts: a text may come in one for each token."""
    if not isinstance(content, list):
        return content or ""
    text = "".join(part.text or "" for part in content if part.type == "text")
    files = [f"[{part.name or part.type}]" for part in content if part.type in ("file", "image")]
    return paragraphs([text, *files])


def _lm_studio_timings(stats: _Stats) -> Timings | None:
    if not stats.predicted_tokens_count:
        return None
    n = int(stats.predicted_tokens_count)
    first_ms = 1e3 * (stats.time_to_first_token_sec or 0.0)
    rate = stats.tokens_per_second or 0.0
    return Timings(
        prompt_n=int(stats.prompt_tokens_count or 0),
        prompt_ms=first_ms,
        predicted_n=n,
        predicted_ms=1e3 * (n - 1) / rate if rate > 0 else 0.0,
        ttft_ms=first_ms,
        reused_known=False,
    )
