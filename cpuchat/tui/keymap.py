"""The user's own keys: `keymap.toml` in the config folder, with a table for each place of the key table (keys.py).

[chat]
new = "ctrl+b"            # in place of Ctrl+N
settings = "f2,ctrl+e"    # either of them
compare = ""              # none: from the palette only
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from textual.keys import KEY_NAME_REPLACEMENTS, Keys, _character_to_key

from cpuchat import config_file, paths
from cpuchat.errors import SettingsError
from cpuchat.tui import keys
from cpuchat.tui.keys import Key

_MODIFIERS: Final = frozenset({"ctrl", "alt", "shift", "super", "hyper", "meta"})
_ALIASES: Final = {
    "esc": "escape", "return": "enter", "del": "delete", "ins": "insert", "pgup": "pageup", "pgdn": "pagedown",
    "pgdown": "pagedown", "page_up": "pageup", "page_down": "pagedown",
}  # fmt: skip
_NAMED: Final = {key.value.rpartition("+")[2] for key in Keys if key.value[0] != "<"}
_CHAT: Final = frozenset({"chat", "prompt", "transcript", "branches", "chats"})
"""Places on the chat screen. A key of the chat works in all of them."""
_TYPED: Final = frozenset({"app", "chat", "prompt"})
"""Places whose keys also work while a message is written."""
_KNOWN: Final = {key.id: key for key in keys.KEYS}
_WIDEST: Final = 40
"""Characters of a name or key that are shown."""
_MOST_PROBLEMS: Final = 8
_MOST_KEYS: Final = 8
"""Keys of one action."""


class Keymap(NamedTuple):
    """Keys by action, of those that were moved; and what could not be used, in words."""

    moved: dict[str, str]
    problems: tuple[str, ...] = ()


def parse_keys(text: str) -> str:
    """Return keys, separated by commas, by Textual's names: `Ctrl+N, ?` is `ctrl+n,question_mark`.

    Raises:
        ValueError: there is no such key, or they are too many.
    """
    parts = [part for part in text.replace(" ", "").split(",") if part]
    if len(parts) > _MOST_KEYS:
        raise ValueError(f"more than {_MOST_KEYS} keys")
    return ",".join(dict.fromkeys(map(_parse_key, parts)))


def _parse_key(text: str) -> str:
    head, plus, name = text[:-1].rpartition("+")  # the last character may be a plus itself
    name += text[-1]
    modifiers = head.lower().split("+") if plus else []
    if len(name) == 1:
        name = _character_to_key(name.lower() if modifiers else name)
    else:
        name = _ALIASES.get(name.lower(), name.lower())
    if not set(modifiers) <= _MODIFIERS or not _is_key(name):
        raise ValueError(f"no key {text[:_WIDEST]!r} (try ctrl+b, f6 or alt+left)")
    return "+".join((*modifiers, name))


def _is_key(name: str) -> bool:
    return name in _NAMED or _is_typed(name)


def _is_typed(name: str) -> bool:
    """Return whether the key writes a character: `n`, `question_mark`, `space`."""
    if name in KEY_NAME_REPLACEMENTS.values():
        return True
    if len(name) == 1:
        return name.isprintable()
    try:
        return unicodedata.lookup(name.replace("_", " ")).isprintable()
    except KeyError:
        return False


def problem_with(key: Key, wanted: str, moved: Mapping[str, str]) -> str:
    """Return why an action cannot have the keys `wanted`, "" if it can: one is typed as text, or is taken.

    Args:
        moved: the other actions that were moved.
    """
    if key.priority or key.place in _TYPED:
        for one in wanted.split(","):
            if one and _is_typed(one):
                return f"{keys.display(one, short=False)} is typed as text"
    taken = [
        f"{keys.display(one, short=False)} is taken by “{other.help.partition(' (')[0]}” ({other.id})"
        for other in keys.KEYS
        for one in _shared(key, wanted, other, moved)
    ]
    return "; ".join(taken)


def _shared(key: Key, wanted: str, other: Key, moved: Mapping[str, str]) -> list[str]:
    """Return keys that two actions at places that meet would both have, but for those that both have by default."""
    if other.id == key.id or not _meet(key.place, other.place):
        return []
    by_default = set(key.keys.split(",")) & set(other.keys.split(","))
    return sorted(set(wanted.split(",")) & set(moved.get(other.id, other.keys).split(",")) - by_default - {""})


def _meet(one: str, other: str) -> bool:
    """Return whether keys of two places can be pressed at the same time."""
    pair = {one, other}
    if len(pair) == 1 or "app" in pair or pair == {"transcript", "branches"}:
        return True
    if pair & _CHAT:
        return "chat" in pair and pair <= _CHAT
    return bool(pair & {"list", "details"})


def load_keymap() -> Keymap:
    """Read the file. What cannot be used is left out: its actions keep their keys."""
    file = paths.keymap_file()
    try:
        tables = config_file.parse(config_file.read(file), file.name)
    except SettingsError as error:
        return Keymap({}, (error.message,))
    moved: dict[str, str] = {}
    problems: list[str] = []
    for place, table in tables.items():
        for name, text in table.items() if isinstance(table, dict) else [("", table)]:
            id = f"{place}.{name}".rstrip(".")
            try:
                if id not in _KNOWN:
                    raise ValueError("no such action")
                if not isinstance(text, str):
                    raise ValueError('needs keys in quotes, such as "ctrl+b"')
                moved[id] = parse_keys(text)
            except ValueError as error:
                problems.append(f"{id[:_WIDEST]}: {error}")
    while wrong := _without_conflicts(moved):
        problems += wrong
    if (more := len(problems) - _MOST_PROBLEMS) > 1:
        problems[_MOST_PROBLEMS:] = [f"and {more} more"]
    return Keymap(moved, tuple(problems))


def _without_conflicts(moved: dict[str, str]) -> list[str]:
    """Leave out what cannot be, the last first, and return why. The defaults that return may be what others were moved
    to: repeat it until nothing is left out.
    """
    problems: list[str] = []
    for id in reversed(list(moved)):
        if problem := problem_with(_KNOWN[id], moved[id], moved):
            problems.append(f"{id}: {problem}")
            del moved[id]
    return problems


def save_keys(key: Key, wanted: str | None) -> None:
    """Write the keys of an action, None: its default. Comments and all other lines stay.

    Raises:
        SettingsError: the file is not valid TOML.
        OSError: it cannot be written.
    """
    place, _, name = key.id.partition(".")

    def edit(document: Any) -> None:
        if wanted is not None:
            document.setdefault(place, {})[name] = wanted
        elif place in document:
            document[place].pop(name, None)

    file = paths.keymap_file()
    config_file.change(file, edit, lambda text: config_file.parse(text, file.name))
