"""The built-in tools: reading files, listing folders and searching, in one folder that the user named.

Nothing leads out of the folder: each part of a path is opened from the one before it, and links are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch, translate
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import msgspec

from cpuchat.base import paths
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import UsageError
from cpuchat.base.text import clean_line
from cpuchat.protocol.messages import Tool, ToolCall, ToolResult
from cpuchat.telemetry.units import plural, size
from cpuchat.tools.loop import CALL_SECONDS

IS_POSSIBLE = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
"""Whether this system can open files from a folder that is open."""
_SECRETS = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*",
    "*.ppk", "*.jks", "*.keystore", ".envrc", ".netrc", ".pgpass", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd",
    ".my.cnf", ".s3cfg", ".vault-token", "credentials", "credentials.json", "credentials.toml", "credentials.xml",
    "application_default_credentials.json", "auth.json", "mcp.json", ".mcp.json", "stored_tokens",
    ".*_history", "fish_history", ".*hst", ".histfile", ".viminfo",
    ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".git", ".password-store", "keyrings",
)  # fmt: skip
_is_secret = re.compile("|".join(map(translate, _SECRETS)), re.IGNORECASE).match
_REFUSED = "Files that may hold keys or passwords are not read."
_SKIPPED = {"node_modules", "__pycache__"}  # in a search, beside hidden ones
_MAX_BYTES = 4_000_000  # of a file
_MAX_LINES = 2_000
_MAX_NAMES = 500
MAX_HITS = 200
_MAX_FILES = 20_000
_LONGEST_LINE = 300
SEARCH_SECONDS = 10.0
_READ = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class _ReadFile(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    first_line: int = 1
    last_line: int | None = None


class _ListFolder(msgspec.Struct, forbid_unknown_fields=True):
    path: str = "."


class _Search(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    path: str = "."
    file_name: str = "*"


def _tool(name: str, description: str, required: str = "", **properties: dict[str, Any]) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}
    return Tool(name=name, description=description, parameters=schema, read_only=True)


_PATH = {"type": "string", "description": "Relative to the folder"}
_LINE = {"type": "integer", "minimum": 1}
TOOLS = (
    _tool("read_file", "Return the text of a file, or some of its lines.", "path",
          path=_PATH, first_line=_LINE, last_line=_LINE),
    _tool("list_folder", "Return the names in a folder, with sizes.", path=_PATH),
    _tool("search", "Find a text (not a pattern; case does not matter) in files, and return the lines with it.", "text",
          text={"type": "string", "minLength": 1, "maxLength": 200}, path=_PATH,
          file_name={"type": "string", "description": "Which files, for example *.py"}),
)  # fmt: skip


class Folder:
    """A folder in which the built-in tools work; see `loop.ToolSource`.

    A call has descriptors of its own: one that is cancelled goes on in its thread, a search for 10 s at most; its
    result is dropped.
    """

    timeout = CALL_SECONDS

    def __init__(self, path: Path) -> None:
        """Raises UsageError if there is no such folder, or the system cannot confine tools to it."""
        if not IS_POSSIBLE:
            raise UsageError("On this system tools cannot be confined to a folder.", "Use them on Linux or macOS.")
        self.path = path.absolute()
        self._root, self._private = -1, _private()
        try:
            self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            real = Path(os.path.realpath(path))
            is_private = any(_is_secret(one.name) or self._hides(one.stat()) for one in (real, *real.parents))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"Cannot open the folder {clean_line(str(path))}: {reason}.") from None
        if is_private:
            self.release()
            raise UsageError(f"{clean_line(str(path))} may hold keys or passwords.", "Name another folder.")
        self.tools: Sequence[Tool] = [msgspec.structs.replace(tool, origin=str(self.path)) for tool in TOOLS]
        """An approval holds for this folder only."""
        self._tools: dict[str, tuple[type, Callable[[Any], str]]] = {
            "read_file": (_ReadFile, self._read_file),
            "list_folder": (_ListFolder, self._list_folder),
            "search": (_Search, self._search),
        }

    def release(self) -> None:
        """Give up the folder. Idempotent."""
        root, self._root = self._root, -1
        if root >= 0:
            os.close(root)

    async def close(self) -> None:
        self.release()

    async def ready(self) -> None: ...

    async def run(self, call: ToolCall) -> ToolResult:
        return await asyncio.to_thread(self.result, call)

    def result(self, call: ToolCall) -> ToolResult:
        """Return what the model is told. Errors are told, too: it can correct itself. Blocks."""
        if call.problem or call.name not in self._tools:
            return ToolResult(text=call.problem or f"There is no tool {clean_line(call.name)}.", failed=True)
        kind, run = self._tools[call.name]
        self._private = _private()  # files may have been replaced
        try:
            return ToolResult(text=run(msgspec.convert(call.arguments, prepared(kind), strict=False)))
        except msgspec.ValidationError as error:
            return ToolResult(text=f"Wrong arguments: {error}.", failed=True)
        except UsageError as error:
            return ToolResult(text=error.message, failed=True)
        except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
            return ToolResult(text=f"Cannot read it: {getattr(error, 'strerror', None) or error}.", failed=True)

    # Tools

    def _read_file(self, wanted: _ReadFile) -> str:
        with _stream(self._open(wanted.path)) as stream:
            data = stream.read(_MAX_BYTES + 1)
        if b"\0" in data:
            raise UsageError("It is a binary file.")
        is_whole = len(data) <= _MAX_BYTES
        lines = data[:_MAX_BYTES].decode("utf-8-sig", "replace").splitlines()
        if not lines:
            return "(empty)"
        first = max(1, wanted.first_line)
        last = min(len(lines), wanted.last_line or len(lines), first + _MAX_LINES - 1)
        of = f"{len(lines):,}" if is_whole else f"over {len(lines):,}"
        if first > last:
            raise UsageError(f"No such lines: it has {'' if is_whole else 'over '}{plural(len(lines), 'line')}.")
        text = "\n".join(lines[first - 1 : last])
        return text if (first, last) == (1, len(lines)) and is_whole else f"Lines {first}-{last} of {of}:\n{text}"

    def _list_folder(self, wanted: _ListFolder) -> str:
        handle = self._open(wanted.path, folder=True)
        try:
            with os.scandir(handle) as entries:
                found = sorted((_line(entry) for entry in entries if not _is_secret(entry.name)), key=str.lower)
        finally:
            os.close(handle)
        more = f"\n… and {len(found) - _MAX_NAMES:,} more" if len(found) > _MAX_NAMES else ""
        return "\n".join(found[:_MAX_NAMES]) + more or "(empty)"

    def _search(self, wanted: _Search) -> str:
        if not wanted.text.strip():
            raise UsageError("The text to search for is empty.")
        deadline, hits, n_files = time.monotonic() + SEARCH_SECONDS, list[str](), 0
        pattern = re.compile(re.escape(wanted.text), re.IGNORECASE)
        for name, data in self._files(wanted.path, wanted.file_name, deadline):
            n_files += 1
            if b"\0" not in data:
                lines = enumerate(data.decode("utf-8", "replace").splitlines(), 1)
                found = (f"{name}:{n}: {line.strip()[:_LONGEST_LINE]}" for n, line in lines if pattern.search(line))
                hits += islice(found, MAX_HITS - len(hits))
            if len(hits) >= MAX_HITS or n_files >= _MAX_FILES:
                break
        else:
            if time.monotonic() <= deadline:
                return "\n".join(hits) or f"Not found in {plural(n_files, 'file')}."
        return "\n".join([*hits, f"… stopped after {plural(n_files, 'file')}: narrow the search"])

    def _files(self, path: str, file_name: str, deadline: float) -> Iterator[tuple[str, bytes]]:
        """Yield matching files under `path`, none hidden or secret, with their bytes; until `deadline` (monotonic)."""
        at = self._relative(path)
        handle, pending = self._open(path, folder=True), [at]
        try:
            while pending and time.monotonic() <= deadline:
                if (folder := pending.pop()) != at:
                    try:
                        is_inner = folder.parent == at  # else opened from the top: no handles are held for all levels
                        inner = self._descend(PurePosixPath(folder.name), handle) if is_inner else self._descend(folder)
                    except (UsageError, OSError):  # it has just vanished, or must not be read
                        continue
                    os.close(handle)
                    handle, at = inner, folder
                with contextlib.suppress(OSError), os.scandir(handle) as entries:
                    shown = [one for one in entries if not (one.name.startswith(".") or _is_secret(one.name))]
                    folders = {one.name for one in shown if one.is_dir(follow_symlinks=False)}
                    pending += [folder / name for name in sorted(folders - _SKIPPED, reverse=True)]
                    for name in sorted(one.name for one in shown if one.name not in folders):
                        if time.monotonic() > deadline:
                            return
                        if fnmatch(name, file_name):  # what cannot be read, or is no file, is passed over
                            with (
                                contextlib.suppress(OSError, UsageError),
                                _stream(self._opened(name, handle)) as stream,
                            ):
                                yield str(folder / name), stream.read(_MAX_BYTES)
        finally:
            os.close(handle)

    # Paths

    def _open(self, path: str, *, folder: bool = False) -> int:
        """Open what `path` names inside the folder; returns its descriptor. Raises OSError, ValueError, UsageError."""
        handle = self._descend(self._relative(path))
        if folder and not stat.S_ISDIR(os.fstat(handle).st_mode):
            os.close(handle)
            raise UsageError("It is not a folder. read_file reads files.")
        return handle

    def _relative(self, path: str) -> PurePosixPath:
        relative = PurePosixPath(path.removeprefix(f"{self.path}/") if path != str(self.path) else ".")
        if relative.is_absolute() or ".." in relative.parts:
            raise UsageError("Only what is in the folder can be read: give a relative path without `..`.")
        if any(_is_secret(part) for part in relative.parts):
            raise UsageError(_REFUSED)
        return relative

    def _descend(self, path: PurePosixPath, start: int | None = None) -> int:
        handle = os.dup(self._root if start is None else start)
        for part in path.parts:
            try:
                inner = self._opened(part, handle)
            except OSError as error:
                reason = "links are not followed" if error.errno == errno.ELOOP else error.strerror or error
                raise UsageError(f"Cannot read {clean_line(str(path))}: {reason}.") from None
            finally:
                os.close(handle)
            handle = inner
        return handle

    def _opened(self, name: str, folder: int) -> int:
        """Open what an open folder has under a name. Raises OSError; UsageError if it is private, whatever its name."""
        handle = os.open(name, _READ, dir_fd=folder)
        if self._hides(os.fstat(handle)):
            os.close(handle)
            raise UsageError(_REFUSED)
        return handle

    def _hides(self, status: os.stat_result) -> bool:
        return (status.st_dev, status.st_ino) in self._private


def _stream(handle: int) -> BinaryIO:
    """Return an open file as a stream. Raises UsageError, and closes it, if it is no file."""
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UsageError("It is not a file. list_folder lists folders.")
    return os.fdopen(handle, "rb")


def _private() -> set[tuple[int, int]]:
    """Return the identities of cpuchat's own folders and files with keys, and of other programs' places for keys."""
    environment = os.environ.get
    config, cache = environment("XDG_CONFIG_HOME") or "~/.config", environment("XDG_CACHE_HOME") or "~/.cache"
    token = environment("HF_TOKEN_PATH") or Path(environment("HF_HOME") or Path(cache, "huggingface"), "token")
    found = set[tuple[int, int]]()
    for place in (
        paths.config_dir(), paths.data_dir(), paths.cache_dir(), paths.tool_servers_file(), paths.keys_file(),
        token, Path(config, "gh"), Path(config, "gcloud"), Path(config, "op"),
    ):  # fmt: skip
        with contextlib.suppress(OSError):
            status = paths.expanded(place).stat()
            found.add((status.st_dev, status.st_ino))
    return found


def _line(entry: os.DirEntry[str]) -> str:
    name = clean_line(entry.name)
    try:
        if entry.is_symlink():
            return f"{name}  (link)"
        if entry.is_dir(follow_symlinks=False):
            return f"{name}/"
        return f"{name}  {size(entry.stat(follow_symlinks=False).st_size)}"
    except OSError:  # it has just vanished
        return name
