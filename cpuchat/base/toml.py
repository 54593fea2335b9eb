"""TOML files that people edit (settings, presets, keys): parsed in a time bounded by their size, and changed in place
with the comments kept.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cpuchat.base import paths
from cpuchat.base.errors import SettingsError
from cpuchat.base.files import file_lock, write_atomically

_MAX_PARTS = 32
"""Parts of a dotted key. `tomllib` takes quadratic time: minutes for 50,000, which are 100 kB."""
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![\w-])(?:{_PART}[ \t]*+\.[ \t]*+){{{_MAX_PARTS}}}", re.ASCII)


def loads(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError for invalid TOML, numbers with too many digits, and too deep nesting."""
    if found := _LONG_KEY.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ValueError(f"a key with over {_MAX_PARTS} dotted parts (at line {line})")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


T = TypeVar("T")


def read(file: Path) -> str:
    """Return the text of a file, "" if it is missing. Raises SettingsError if it cannot be read."""
    try:
        return paths.read_text(file)
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file} is not UTF-8 text (byte {error.start + 1}).", "Save it as UTF-8.") from None
    except OSError as error:
        raise SettingsError(f"Cannot read {file}: {error.strerror}.", "Fix or remove it.") from None


def parse(text: str, origin: str) -> dict[str, Any]:
    """Parse a file. Raises SettingsError, which names `origin`, if it is not valid TOML."""
    try:
        return loads(text)
    except ValueError as error:
        raise SettingsError(f"{origin} is not valid TOML: {error}.", "Fix that line or remove the file.") from None


def change(file: Path, edit: Callable[[Any], object], check: Callable[[str], T]) -> T:
    """Let `edit` change the document as it is now; every other line and comment stays. Returns what `check` makes of
    the new text: it is called with the text before and after, and nothing is written if it raises.

    The file is replaced atomically and keeps its permissions; a link stays one, its target is replaced. Raises
    SettingsError: the file cannot be read; OSError: it cannot be written."""
    import tomlkit  # only when writing: reading at start needs no third parser
    from tomlkit.exceptions import TOMLKitError

    file = Path(os.path.realpath(file))  # a link, to a folder of dotfiles for instance, stays one
    file.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(file.parent):
        before = read(file)
        check(before)
        try:
            document = tomlkit.parse(before)
        except (TOMLKitError, RecursionError) as error:  # what `toml` has just read
            raise SettingsError(f"Cannot change {file}: {error}.", "Edit it by hand.") from None
        edit(document)
        after = tomlkit.dumps(document)
        checked = check(after)
        mode = stat.S_IMODE(file.stat().st_mode) if file.exists() else 0o600
        write_atomically(file, after, mode=mode)
    return checked
