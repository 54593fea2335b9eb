"""Reads export files: finds out by their content which program wrote them."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.chats.records import storable
from cpuchat.chats.transfer import chatgpt, llama_server, lm_studio, portable
from cpuchat.chats.transfer.portable import Document, PortableChat
from cpuchat.errors import ChatsTooNew, UsageError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escaped; msgspec would not take half a pair
_SUFFIXES = (".json", ".jsonl")
_LARGEST = 4 << 30  # bytes of a file in an archive


@dataclass
class ExportFile:
    """The chats of a file. `source` is the program that wrote it; `problems` are about chats that cannot be read."""

    source: str
    chats: list[PortableChat] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_exports(path: Path) -> ExportFile:
    """Return the chats of a JSON file, or of all that are in a ZIP archive or a folder.

    Raises:
        UsageError: it cannot be read, or nothing in it is an export.
        ChatsTooNew: a newer version wrote it.
    """
    try:
        found = [one for name, data in _files(path) if (one := _read(name, data)) is not None]
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
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
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix in _SUFFIXES and file.is_file():
                yield file.name, file.read_bytes()
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for one in archive.infolist():
                if one.filename.endswith(_SUFFIXES) and one.file_size <= _LARGEST:
                    yield one.filename, archive.read(one)
    else:
        yield path.name, path.read_bytes()


def _read(name: str, data: bytes) -> ExportFile | None:
    """Return the chats of a file; None when it is no export."""
    try:
        value = _parsed(data)
    except (ValueError, RecursionError):
        try:
            value = llama_server.sessions(_parsed(line) for line in data.splitlines() if line.strip())
        except (ValueError, RecursionError):
            return None
    if isinstance(value, dict) and value.get("format") == "cpuchat-chats":
        return ExportFile("cpuchat", _document(name, value))
    if isinstance(value, dict) and value.get("type") == "session":
        value = llama_server.sessions([value])  # one line: no message
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
            return "ChatGPT", chatgpt.read, value
        case {"messages": [{"versions": _}, *_]}:
            return "LM Studio", lm_studio.read, value
        case {"messages": [], "createdAt": _}:
            return "LM Studio", lm_studio.read, value
        case {"conv": {}, "messages": [*_]} | {"messages": [{"role": _, "content": _}, *_]}:
            return "llama-server", llama_server.read, value
        case _:
            return None


def _document(name: str, value: dict[str, Any]) -> list[PortableChat]:
    version = value.get("version")
    if isinstance(version, int) and version > portable.VERSION:
        raise ChatsTooNew(f"{name} was exported by a newer version of cpuchat.", "Update cpuchat.")
    try:
        return msgspec.convert(value, Document).chats
    except msgspec.ValidationError as error:
        raise UsageError(f"{name} is not a valid export of cpuchat: {error}.") from None
