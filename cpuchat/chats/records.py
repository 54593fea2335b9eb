"""Chats and their messages as records: validation of their rows, titles, and branches.

SQLite takes any value in any column, and a file can be damaged anywhere: nothing is taken from it unchecked.

A message follows its parent; those with the same parent are siblings: alternative answers, or edits of a question. Ids
grow with time, so a message has a larger id than its parent, and the newest of a branch is the end of one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.config.settings import valid_values
from cpuchat.protocol.messages import Generate, Role, Sampling, Speculation, ToolStep
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings

WhenFull = Literal["", "drop", "compact", "stop"]
INTERRUPTED = "interrupted"
_LATEST = 2.5e11  # seconds since the epoch; the year 9892, the calendar ends soon after
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LARGEST = 1e19  # of a figure in timings; seeds have 63 bits

_T = TypeVar("_T")


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation. Times in seconds since the epoch. `version` changes whenever its messages do.

    `sides` of a comparison (`Comparison`): each prompt has two answers, A's first. "" for a chat. `leaf` is the end
    of the open branch; None: the newest message. `when_full` is what to do when the chat no longer fits the context:
    leave out the oldest turns, let the model summarize it, or stop; "" is to ask. `own` are values of
    settings for this chat alone, by key (`settings.OF_CHAT`)."""

    id: str = ""
    title: str = ""
    created: float = 0.0
    updated: float = 0.0
    model: str = ""
    system_prompt: str = ""
    version: int = 0
    sides: str = ""
    leaf: int | None = None
    when_full: WhenFull = ""
    own: dict[str, Any] = {}


class Deleted(msgspec.Struct, frozen=True):
    """Deleted rows of each table, to be put back, and the first message of a branch (0: the chat), whose `leaf` was
    open (0: it was not)."""

    chat_id: str
    message_id: int
    rows: dict[str, list[tuple[Any, ...]]]
    leaf: int = 0


class Excerpt(msgspec.Struct, frozen=True):
    """A message that a search found: the text around the first hit, on one line, and where in it the hits are."""

    message_id: int
    text: str
    marks: tuple[tuple[int, int], ...]


class SearchHit(Chat, frozen=True, kw_only=True):
    """A chat that a search found, and its first messages with a hit, on any branch; none when it is in the title."""

    excerpts: tuple[Excerpt, ...] = ()


class AnswerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that an answer was generated with, beside its chat's own system prompt and the seed in its timings.

    `path`: the model's file; `draft`: the draft model's name. `default_sampling`: what is used with this model where
    the settings have nothing. `unset`: options of `sampling` that were not sent to the server, which used its own."""

    sampling: Sampling = Sampling()
    max_tokens: int = 0
    speculation: Speculation = Speculation()
    reasoning: bool | None = None
    reasoning_budget: int | None = None
    path: str = ""
    quantization: str = ""
    draft: str = ""
    draft_quantization: str = ""
    default_sampling: Sampling = Sampling()
    unset: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: Generate, model: ModelInfo | None, default_sampling: Sampling) -> AnswerSettings:
        """Return those of a request to a model; None: not known, as after a crash."""
        asked, of_model = cls.__struct_fields__[:5], cls.__struct_fields__[5:9]
        known = {} if model is None else {name: getattr(model, name) for name in of_model}
        given = {name: getattr(request, name) for name in asked}
        found = cls(**given, **known, default_sampling=default_sampling)
        if model is None or not model.server:
            return found
        # A server got not this machine's drafters, no option that is unset, nothing that it does not take.
        default, ignored = cls(), model.ignored
        unsent = tuple(name for name in Sampling.__struct_fields__ if name in request.unset or name in ignored)
        others = {name: getattr(default, name) for name in ignored if name in cls.__struct_fields__}
        sampling = msgspec.structs.replace(found.sampling, **{name: getattr(default.sampling, name) for name in unsent})
        speculation = default.speculation
        return msgspec.structs.replace(found, **others, sampling=sampling, unset=unsent, speculation=speculation)


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """A text sent with a message, as it was then. `mark` stands for it in the message (`@src/main.py:10-80`); "" when
    nothing does. `title` says what it is: "src/main.py, lines 10-80"."""

    mark: str = ""
    title: str
    text: str


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a chat. `parent` is the id of the one that it follows, 0 at the beginning of the chat.

    `attachments` are sent before the text of a question, `steps` come before an answer. `settings` is what an answer
    was generated with. `stop_reason` of an answer is a `StopReason`, the code of an error, "interrupted" when its app
    died in the middle of it, or None while it is being written; of a question, the code of the error that refused it as
    too long. `recording` is the JSON of a compared answer's tokens (`compare.runner.KeptTokens`). `chat_id` is of the
    store: no document has it."""

    id: int = 0
    parent: int = 0
    role: Role
    content: str = ""
    reasoning: str = ""
    model: str = ""
    stop_reason: str | None = None
    timings: Timings | None = None
    settings: AnswerSettings | None = None
    attachments: tuple[Attachment, ...] = ()
    steps: tuple[ToolStep, ...] = ()
    recording: str | None = None
    created: float = 0.0
    chat_id: str = ""

    @property
    def sampling(self) -> Sampling | None:
        return self.settings.sampling if self.settings is not None else None

    @property
    def default_sampling(self) -> Sampling | None:
        return self.settings.default_sampling if self.settings is not None else None

    @property
    def is_summary(self) -> bool:
        """Return whether it is a model's summary of what comes before it."""
        return self.role == "system" and bool(self.model)


CHAT_COLUMNS = Chat.__struct_fields__
MESSAGE_COLUMNS = StoredMessage.__struct_fields__
_JSON_COLUMNS = ("timings", "settings", "attachments", "steps", "recording")


def new_chat_id() -> str:
    return secrets.token_hex(8)


def is_chat_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def repaired_chat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return `row` of the table `chats` with invalid values replaced."""
    created = valid_time(row["created"], row["updated"])
    version, leaf, own = row["version"], row["leaf"], row["own"]
    return {
        "id": row["id"] if is_chat_id(row["id"]) else new_chat_id(),
        **{name: _text(row[name]) for name in ("title", "model", "system_prompt", "sides")},
        "created": created,
        "updated": valid_time(row["updated"], created),
        "version": version if isinstance(version, int) and 0 <= version < 1 << 53 else 0,
        "leaf": leaf if isinstance(leaf, int) else None,
        "when_full": row["when_full"] if row["when_full"] in get_args(WhenFull) else "",
        "own": valid_values(own) if isinstance(own, dict) else own if is_unicode(own) else None,
    }


def repaired_message(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `row` of the table `messages` with invalid values replaced, a parent by -1; None: its role is unknown."""
    if row["role"] not in get_args(Role):
        return None
    parent, stop_reason = row["parent"], row["stop_reason"]
    return {
        **row,
        **{name: _text(row[name]) for name in ("chat_id", "content", "reasoning", "model")},
        "parent": parent if isinstance(parent, int) and 0 <= parent < 1 << 53 else -1,
        "stop_reason": stop_reason if stop_reason is None else _text(stop_reason)[:100],
        **{name: row[name] if is_unicode(row[name]) else None for name in _JSON_COLUMNS},
        "created": valid_time(row["created"], 0.0),
    }


def chat_of(row: tuple[Any, ...]) -> Chat:
    """Build the record of a row, with invalid values replaced."""
    fields = repaired_chat(dict(zip(CHAT_COLUMNS, row, strict=True)))
    return Chat(**{**fields, "own": valid_values(from_json(fields["own"], dict[str, Any]) or {})})


def message_of(row: tuple[Any, ...]) -> StoredMessage | None:
    """Build the record of a row, with invalid values replaced; None when its role is unknown."""
    fields = repaired_message(dict(zip(MESSAGE_COLUMNS, row, strict=True)))
    if fields is None:
        return None
    for name, kind in (("timings", Timings), ("settings", AnswerSettings)):
        fields[name] = from_json(fields[name], kind)
    for name, kinds in (("attachments", tuple[Attachment, ...]), ("steps", tuple[ToolStep, ...])):
        fields[name] = from_json(fields[name], kinds) or ()
    return StoredMessage(**fields)


def column(value: object) -> Any:
    """Return `value` as it is stored: a text as valid UTF-8, a record and tuples of them as JSON."""
    match value:
        case str():
            return storable(value)
        case () | {} if not value:
            return None
        case tuple() | dict() | msgspec.Struct():
            # Not msgspec.json: it takes no half of a surrogate pair, as in a file's name.
            return storable(json.dumps(msgspec.to_builtins(value), ensure_ascii=False, separators=(",", ":")))
        case _:
            return value


def storable(text: str) -> str:
    """Make `text` valid UTF-8: half a surrogate pair (from a broken paste) becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def decoded(raw: bytes) -> str:
    """Decode for `sqlite3.Connection.text_factory`: bytes that are not UTF-8 become surrogates, which `_text` finds."""
    return raw.decode("utf-8", "surrogateescape")


def is_unicode(value: object) -> bool:
    """Return whether `decoded` found no invalid UTF-8 in the text."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    return True


def _text(value: object) -> str:
    match value:
        case str() if is_unicode(value):
            return value
        case str():
            return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        case bytes():
            return value.decode("utf-8", "replace")
        case None:
            return ""
        case _:
            return str(value)


def valid_time(value: object, otherwise: object) -> float:
    """Return the first of both that is seconds since the epoch within the calendar, else 0."""
    for candidate in (value, otherwise):
        if isinstance(candidate, int | float) and 0 <= candidate <= _LATEST:
            return float(candidate)
    return 0.0


def from_json(text: object, kind: type[_T]) -> _T | None:
    """Return what is in a column as JSON; None if it makes no sense."""
    if not isinstance(text, str):
        return None
    try:
        figures = msgspec.json.decode(text, type=prepared(kind))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return figures if _sensible(msgspec.to_builtins(figures)) else None


def _sensible(value: Any) -> bool:
    """Return whether all figures are finite and small enough to show and divide by."""
    if isinstance(value, int | float):  # most are, and a long chat has a hundred thousand
        return abs(value) <= _LARGEST  # not so for infinity and NaN
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return True
    return all(map(_sensible, value))


TITLE_LENGTH = 48
# Of a heading, a quote or a list item; strong emphasis and code.
_MARKDOWN_MARKS = re.compile(r"^\s*(?:#{1,6}\s+|>\s*|[-*+]\s+|\d+\.\s+)|`+|\*\*+")


def title_of(text: str, attachments: Sequence[Attachment] = ()) -> str:
    """Return a chat's first title: the first line of its first message without Markdown marks, cut at a word. Of a
    message that is nothing but pasted text, that text's first line."""
    pasted = (one.text for one in attachments if one.mark == text.strip() and not one.mark.startswith("@"))
    first = next((part for part in next(pasted, text).splitlines() if part.strip()), "")
    line = " ".join(_MARKDOWN_MARKS.sub("", first).split())
    if len(line) <= TITLE_LENGTH:
        return line or "New chat"
    return line[: TITLE_LENGTH + 1].rsplit(" ", 1)[0][:TITLE_LENGTH] + "…"


class Tree:
    """The ids of a chat's messages; 0 is the beginning of the chat. `rows`: id and parent of each message, ids
    ascending; one whose parent is missing follows the last before that. `leaf`: the end of the open branch; where that
    is not stored, or does not exist, the newest message."""

    def __init__(self, rows: Iterable[tuple[int, object]] = (), leaf: object = None) -> None:
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {0: []}
        self.leaf: int = 0
        for id, parent in rows:
            if not isinstance(parent, int) or not 0 <= parent < id:
                parent = self.leaf
            while parent not in self._children:
                parent = max((known for known in self._parents if known < parent), default=0)
            self.add(id, parent)
        if isinstance(leaf, int) and leaf in self._parents:
            self.leaf = leaf

    def __contains__(self, id: int) -> bool:
        return id in self._parents

    def add(self, id: int, parent: int) -> None:
        """Add a message, which becomes the end of the open branch."""
        if id not in self._parents:
            self._parents[id] = parent
            self._children[id] = []
            self._children[parent].append(id)
        self.leaf = id

    def parent(self, id: int) -> int:
        """Return the message that this one follows; 0 at the beginning of the chat."""
        return self._parents[id]

    def path(self, id: int) -> list[int]:
        """Return the messages from the first one to this."""
        path: list[int] = []
        while id:
            path.append(id)
            id = self._parents[id]
        return path[::-1]

    def siblings(self, id: int) -> list[int]:
        """Return the messages with the same parent, oldest first, this one included."""
        return self._children[self._parents[id]] if id in self else [id]

    def children(self, id: int) -> list[int]:
        """Return the messages that follow this one directly, oldest first."""
        return list(self._children[id])

    def subtree(self, id: int) -> list[int]:
        """Return this message and all that follow from it; the last one is the newest. [] for an unknown one."""
        found = [id] if id in self else []
        for one in found:
            found += self._children[one]
        return sorted(found)

    def after_deletion(self, id: int) -> int:
        """Return where to go on without the branch from `id`: the end of the one beside it, else its parent, or 0."""
        siblings = self.siblings(id)
        at = siblings.index(id)
        beside = siblings[at - 1 : at] if at else siblings[1:2]
        return self.subtree(beside[0])[-1] if beside else self._parents[id]
