"""Exports chats of the store, and imports files into it: their content tells which program wrote them."""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import ChatsTooNew, UsageError
from cpuchat.base.files import walk
from cpuchat.chats.records import Chat, is_chat_id, repaired_chat, storable, valid_time
from cpuchat.chats.store import ChatStore
from cpuchat.chats.transfer import formats
from cpuchat.chats.transfer.formats import Document, PortableChat, portable_chat


@dataclass
class Imported:
    """Results of an import: chats `added` under their ids, `known` were there already, `empty` have no messages."""

    added: list[Chat] = field(default_factory=list)
    known: int = 0
    empty: int = 0


def export_chat(store: ChatStore, chat: Chat) -> PortableChat:
    """Return a chat with all its branches. Raises ChatsError."""
    return portable_chat(chat, store.all_messages(chat.id))


def import_chats(store: ChatStore, chats: Iterable[PortableChat]) -> Imported:
    """Add the chats that the store does not have, all or none of them; nothing in it is changed.

    A chat keeps its id; when another one has it, or it comes from another program, its id is made of its content. So a
    file that is imported again adds only what is new in it, as chats of their own. Raises ChatsError: nothing was
    added.
    """
    done = Imported()
    with store.transaction():
        known = {chat.id: chat for chat in store.chats()}
        for one in chats:
            if not one.messages:
                done.empty += 1
                continue
            id = one.id if is_chat_id(one.id) else one.digest
            if id in known and id != one.digest and export_chat(store, known[id]).digest != one.digest:
                id = one.digest
            if id in known:
                done.known += 1
                continue
            known[id] = _add(store, one, id)
            done.added.append(known[id])
    return done


def _add(store: ChatStore, one: PortableChat, id: str) -> Chat:
    chat = Chat(**repaired_chat(msgspec.structs.asdict(one) | {"id": id, "version": 0}))
    messages = [
        msgspec.structs.replace(message, created=valid_time(message.created, chat.created), chat_id=id)
        for message in one.messages
    ]
    store.add_copy(chat, messages)
    return chat


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escaped; msgspec would not take half a pair
_SUFFIXES = (".json", ".jsonl")
_DIVIDE = "Divide it, or import the files in it one by one."
FILE_BYTES, TOTAL_BYTES = 256 << 20, 1 << 30  # bytes of a file, and of all that are read at once


@dataclass
class ExportFile:
    """The chats of a file. `source` is the program that wrote it; `problems` are about chats that cannot be read."""

    source: str
    chats: list[PortableChat] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_exports(path: Path) -> ExportFile:
    """Return the chats of a JSON file, or of all that are in a ZIP archive or a folder. Raises UsageError: it cannot be
    read, or nothing in it is an export; ChatsTooNew: a newer version wrote it.
    """
    try:
        found = [one for name, data in _files(path) if (one := _read(name, data)) is not None]
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        what = getattr(error, "strerror", None) or error
        raise UsageError(f"Cannot read {path}: {what}.") from None
    if not found:
        raise UsageError(
            f"Not an export of chats: {path}.",
            "Readable are JSON exports of cpuchat, ChatGPT's data export, LM Studio's conversations and exports of"
            " llama-server's web UI.",
        )
    return ExportFile(
        " and ".join(dict.fromkeys(one.source for one in found)),
        [chat for one in found for chat in one.chats],
        [problem for one in found for problem in one.problems],
    )


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    room = TOTAL_BYTES
    for name, size, opened in _opened(path):
        with opened() as file:
            data = file.read((size or FILE_BYTES) + 1) if size <= min(FILE_BYTES, room) else b""  # 0: a pipe
        size = max(size, len(data))
        if size > FILE_BYTES:
            raise UsageError(f"{name} is too large: {size >> 20} MiB of {FILE_BYTES >> 20} MiB at most.", _DIVIDE)
        if (room := room - size) < 0:
            raise UsageError(f"{path} holds more than {TOTAL_BYTES >> 20} MiB of JSON.", _DIVIDE)
        yield name, data


def _opened(path: Path) -> Iterator[tuple[str, int, Callable[[], IO[bytes]]]]:
    """Yield the files to read: name, size in bytes as far as it is known before, and what opens it."""
    if path.is_dir():
        for folder, names in walk(path):
            for file in (folder / name for name in names):
                if file.suffix in _SUFFIXES and file.is_file():
                    yield file.name, file.stat().st_size, partial(file.open, "rb")
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for one in archive.infolist():
                if one.filename.endswith(_SUFFIXES):
                    yield one.filename, one.file_size, partial(archive.open, one)
    else:
        yield path.name, path.stat().st_size, partial(path.open, "rb")


def _read(name: str, data: bytes) -> ExportFile | None:
    """Return the chats of a file; None when it is no export."""
    try:
        value = _parsed(data)
    except (ValueError, RecursionError):
        try:
            value = formats.sessions(_parsed(line) for line in data.splitlines() if line.strip())
        except (ValueError, RecursionError):
            return None
    if isinstance(value, dict) and value.get("format") == "cpuchat-chats":
        return ExportFile("cpuchat", _document(name, value))
    if isinstance(value, dict) and value.get("type") == "session":
        value = formats.sessions([value])  # one line: no message
    values = value if isinstance(value, list) else [value]
    reading = [found for one in values if (found := _reader(one)) is not None]
    if not reading:
        return None
    exported = ExportFile(reading[0][0])
    for number, (_, read, one) in enumerate(reading, 1):
        try:
            exported.chats.append(read(one))
        except (msgspec.ValidationError, ValueError, OverflowError) as error:
            exported.problems.append(f"chat {number} of {name}: {error}")
    return exported


def _parsed(data: bytes) -> Any:
    """Parse JSON into texts that can be stored: half a surrogate pair, which cut titles end with, becomes "?"."""
    text = data.decode(json.detect_encoding(data), "replace")
    value = json.loads(text)
    return json.loads(storable(json.dumps(value, ensure_ascii=False))) if _SURROGATE.search(text) else value


def _reader(value: Any) -> tuple[str, Callable[[object], PortableChat], object] | None:
    match value:
        case {"mapping": {}}:
            return "ChatGPT", formats.read_chatgpt, value
        case {"messages": [{"versions": _}, *_]}:
            return "LM Studio", formats.read_lm_studio, value
        case {"messages": [], "createdAt": _}:
            return "LM Studio", formats.read_lm_studio, value
        case {"conv": {}, "messages": [*_]} | {"messages": [{"role": _, "content": _}, *_]}:
            return "llama-server", formats.read_llama_server, value
        case _:
            return None


def _document(name: str, value: dict[str, Any]) -> list[PortableChat]:
    version = value.get("version")
    if isinstance(version, int) and version > formats.VERSION:
        raise ChatsTooNew(f"{name} was exported by a newer version of cpuchat.", "Update cpuchat.")
    try:
        return msgspec.convert(value, prepared(Document)).chats
    except msgspec.ValidationError as error:
        raise UsageError(f"{name} is not a valid export of cpuchat: {error}.") from None
