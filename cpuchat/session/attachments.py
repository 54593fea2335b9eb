"""Reads what a message names with @: files, ranges of their lines, folders as listings.

Nothing is read that was not named: a folder gives the names in it, links in it are not followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from cpuchat.base.errors import UsageError
from cpuchat.base.paths import expanded
from cpuchat.base.text import clean_line, is_safe
from cpuchat.chats.records import Attachment, storable
from cpuchat.telemetry.units import plural, size

MAX_BYTES = 4_000_000
"""Of one attachment."""
PASTED_LINES = 40
"""A pasted text with more lines than this becomes an attachment."""
PASTED_CHARACTERS = 20_000
"""Also one with more characters: a text field wraps all of its text at each key."""
_LISTED = 500  # names of a folder
_SCANNED = 20_000
_OFFERED = 50  # completions
_CHUNK = 1 << 16
_PDF = b"%PDF-"  # some are plain ASCII
_QUOTES = {'"': '"', "'": "'", "`": "`", "“": "”", "„": "“", "‘": "’", "«": "»", "「": "」", "『": "』"}
_AROUND = _QUOTES | {"(": ")", "[": "]", "<": ">", "（": "）", "【": "】", "《": "》", "〈": "〉"}
# Letters that follow a name without a space: Thai to Khmer, Chinese, Japanese and Korean with their punctuation.
_UNSPACED = r"\u0e00-\u0eff\u1000-\u11ff\u1780-\u17ff\u2e80-\ud7ff\uf900-\ufaff\uff66-\uffdc\U00020000-\U0003ffff"
_LETTER = rf"[^\W_{_UNSPACED}]"
# No address (me@host), version (pkg@1.2), page (/@user), code ($@, @@) and none that was escaped.
_AT = rf"(?<!{_LETTER})(?<!{_LETTER}_)(?<![/\\$%+@＠-])[@＠]"
_QUOTED = "|".join(rf"{one}[^{other}\n]{{1,1000}}{other}(?::\d+(?:-\d*)?)?" for one, other in _QUOTES.items())
_ENCLOSED = "|".join(rf"(?<=\{one})[@＠][^\{other}@＠\n]+(?=\{other})" for one, other in _AROUND.items())
_NAMED = re.compile(rf"\[Pasted text \d+: [\d,]+ lines?\]|{_AT}(?:{_QUOTED})|{_ENCLOSED}|{_AT}(?:\\.|(?!{_AT})\S)+")
_UNFINISHED = re.compile(rf'{_AT}("[^"\n]*|(?:\\.|(?!{_AT})[^\s"])*)\Z')
_END = re.compile(rf"""(?<![.:])(?:[\s"'`)\]}}>*~|,;!?{_UNSPACED}]|[^\x00-\x7f\w]|\.\.|[.:_]+(?!{_LETTER}))""")
"""What a name may end before."""
_ESCAPED = re.compile(r"\\([^\w\\])")
_LONGEST = 1_000  # characters of a name
_RANGE = re.compile(r"(?P<path>.+):(?P<first>\d{1,15})(?P<dash>-)?(?P<last>\d{1,15})?", re.DOTALL)
_FILES = frozenset({
    "bash", "bat", "c", "cc", "cfg", "conf", "cpp", "cs", "css", "csv", "cu", "diff", "go", "gz", "h", "hpp", "html",
    "ini", "ipynb", "java", "jpeg", "jpg", "js", "json", "jsonl", "jsx", "kt", "log", "lua", "md", "patch", "pdf",
    "php", "png", "proto", "py", "pyi", "rb", "rs", "rst", "scala", "scss", "sh", "sql", "svg", "swift", "tex", "toml",
    "ts", "tsv", "tsx", "txt", "vue", "xml", "yaml", "yml", "zig", "zip",
})  # fmt: skip
"""Extensions after which a name stands for a file: `@notes.md` does, `@pytest.fixture` does not."""


def start_folder() -> Path:
    """Return the folder that paths begin at; the home folder if the current one was deleted."""
    try:
        return Path.cwd()
    except OSError:
        return Path.home()


def attach(text: str, folder: Path, held: Mapping[str, Attachment] | None = None) -> tuple[Attachment, ...]:
    """Read what `text` names, in order, each once; `held`: by mark, what is taken as it is: pasted texts, and the files
    of a message that is edited.

    A name after @ is a file or folder, from `folder` on; `:10-80`, `:10-` or `:10` after it takes these lines alone.
    One that names no file is text, unless it looks like a path: in a folder that exists, or with the extension of a
    file. Raises UsageError: such a file is not there, one cannot be read, is too large or no text."""
    held, found = held or {}, dict[str, Attachment]()
    for match in _NAMED.finditer(text):
        marks = [match[0]]
        if marks[0][1:2] not in _QUOTES:  # what it may be without the text that follows it, the longest first
            ends = (end for end in range(min(len(match[0]), _LONGEST) - 1, 1, -1) if _END.match(match[0], end))
            marks += [match[0][:end] for end in ends]
        paths = {name: _located(name, folder)[0] for mark in marks if (name := _name(mark))}
        mark = next((one for one in marks if one in held or os.path.lexists(paths.get(_name(one), ""))), "")
        if mark and mark not in found:
            found[mark] = held[mark] if mark in held else read_file(_name(mark), folder, mark)
        if mark or not paths:
            continue
        # Not @app.get("/a.js").
        files = [name for name, path in paths.items() if "(" not in name and path.suffix[1:].lower() in _FILES]
        name = [*files, *paths][0 if files else len(paths) - 1]
        if files or ("/" in name.rstrip("/") and os.path.isdir(paths[name].parent)):  # noqa: PTH112 (never raises)
            hint = "Correct the path, or write \\@ for text; nothing was sent."
            raise UsageError(f"No such file: {clean_line(name)}.", hint)
    return tuple(found.values())


def named(text: str) -> list[str]:
    """Return the marks in `text` that may stand for attachments."""
    return [match[0] for match in _NAMED.finditer(text)]


def read_file(name: str, folder: Path, mark: str = "") -> Attachment:
    """Read the file or folder `name`, from `folder` on, which a range of lines may follow. Raises UsageError."""
    path, first, last = _located(name, folder)
    try:
        if path.is_dir():
            names = [
                clean_line(one) + ("" if n_bytes is None else f"  {size(n_bytes)}") for one, n_bytes in _scanned(path)
            ]
            more = [f"… and {len(names) - _LISTED:,} more"] if len(names) > _LISTED else []
            text, title = storable("\n".join([*names[:_LISTED], *more]) or "(empty)"), f"{name}, a folder"
        else:
            text, title = _text(path, name, first, last)
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"Cannot read {clean_line(name)}: {reason}.", "Nothing was sent.") from None
    return Attachment(mark=storable(mark), title=storable(clean_line(title)), text=text)


def pasted(text: str, number: int) -> Attachment:
    """Return pasted text as an attachment; its mark is what stands in the prompt."""
    text = storable(text.replace("\r\n", "\n").replace("\r", "\n"))
    lines = plural(text.count("\n") + (not text.endswith("\n")), "line")
    return Attachment(mark=f"[Pasted text {number}: {lines}]", title=f"Pasted text {number}", text=text)


def is_pasted(attachment: Attachment) -> bool:
    return attachment.mark.startswith("[")


def unfinished(before: str) -> str | None:
    """Return the mark being typed at the end of `before`, the text up to the cursor; None: there is none."""
    found = _UNFINISHED.search(before)
    return found and found[0]


def completions(mark: str, folder: Path) -> list[str]:
    """Return marks of the paths that begin as `mark` does, else that hold its last part; folders end with a slash.
    Hidden names are found when `mark` has the dot, names that cannot be typed not at all."""
    head, slash, part = _ESCAPED.sub(r"\1", mark[1:].removeprefix('"')).rpartition("/")
    start, hidden, part = head + slash, part.startswith("."), part.lower()
    try:
        names = [name for name, _ in _scanned(folder / expanded(start)) if is_safe([name]) and name.isprintable()]
    except (OSError, ValueError):
        return []
    names = [name for name in names if (hidden or not name.startswith(".")) and '"' not in name]
    matching = [name for name in names if name.lower().startswith(part)]
    matching = matching or [name for name in names if part in name.lower()]
    found = [start + name for name in matching[:_OFFERED]]
    return [f"@{name}" if " " not in name else f'@"{name}' if name.endswith("/") else f'@"{name}"' for name in found]


def _name(mark: str) -> str:
    """Return the path, and its range, without what marks them."""
    if mark[:1] not in ("@", "＠"):
        return ""
    name, closing = mark[1:], _QUOTES.get(mark[1:2])
    return _ESCAPED.sub(r"\1", name) if closing is None else name[1:].replace(closing, "")


def _located(name: str, folder: Path) -> tuple[Path, int, int | None]:
    """Return the path, the first line (0: the whole file) and the last (None: the end)."""
    path = folder / expanded(name)
    found = _RANGE.fullmatch(name)
    if found is None or os.path.lexists(path):
        return path, 0, None
    first = max(1, int(found["first"]))
    last = int(found["last"]) if found["last"] else None if found["dash"] else first
    return folder / expanded(found["path"]), first, last


def _opened(path: Path) -> BinaryIO:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for its other end
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "not a regular file")
    return os.fdopen(handle, "rb")


def _text(path: Path, name: str, first: int, last: int | None) -> tuple[str, str]:
    """Return lines of a file, all if `first` is 0, and a title that names them. What is before them is not kept."""
    kept, n_bytes, number, ended = list[bytes](), 0, 1, True
    with _opened(path) as stream:
        start = stream.read(_CHUNK) or b""  # None: of /proc/kmsg and the like, where there is nothing yet
        if b"\0" in start or start.startswith(_PDF):
            raise _no_text(name)
        if start:
            stream.seek(0)
        while start and (last is None or number <= last) and (part := stream.readline(_CHUNK)):
            if number >= first:
                kept.append(part)
                n_bytes += len(part)
                if n_bytes > MAX_BYTES:
                    whole = f"{clean_line(name)} has {size(max(n_bytes, os.fstat(stream.fileno()).st_size))}"
                    found = f"These lines of {clean_line(name)} have over {size(MAX_BYTES)}" if first else whole
                    raise _too_large(found, name)
            ended = part.endswith(b"\n")
            number += ended
    if first and not kept:
        n_lines = number - ended
        fault = f"it has {plural(n_lines, 'line')}" if last is None or last >= first else "the last is before the first"
        raise UsageError(f"No such lines: {clean_line(name)}; {fault}.", "Name others; nothing was sent.")
    text, until, file = _decoded(b"".join(kept), name), number - ended, name.rpartition(":")[0]
    if not first:
        return text, name
    return text, f"{file}, line {first}" if until == first else f"{file}, lines {first}-{until}"


def _decoded(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _no_text(name) from None
    if "\0" in text:
        raise _no_text(name)
    return text


def _no_text(name: str) -> UsageError:
    hint = "Only text can be attached (iconv and pdftotext convert to it); nothing was sent."
    return UsageError(f"{clean_line(name)} is not UTF-8 text.", hint)


def _too_large(found: str, name: str) -> UsageError:
    file = clean_line(name.rpartition(":")[0] if _RANGE.fullmatch(name) else name)
    return UsageError(f"{found}; at most {size(MAX_BYTES)} can be attached.", f"Name fewer lines: @{file}:1-200.")


def _scanned(path: Path) -> list[tuple[str, int | None]]:
    """Return the names in a folder, folders first with a slash, and the sizes of files. Raises OSError."""
    found = list[tuple[str, int | None]]()
    with os.scandir(path) as entries:
        for entry in islice(entries, _SCANNED):
            with contextlib.suppress(OSError):  # it has just vanished
                is_folder = entry.is_dir()
                n_bytes = None if is_folder else entry.stat(follow_symlinks=False).st_size
                found.append((f"{entry.name}/" if is_folder else entry.name, n_bytes))
    return sorted(found, key=lambda one: (one[1] is not None, one[0].lower()))
