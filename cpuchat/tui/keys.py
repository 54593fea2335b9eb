"""Every key of the app, in one table, `keys.json`: bindings, footer, help and palette are made from it.

Each has an id, by which the user can move it to another key: `keymap.toml` in the config folder has a table for each
place of the key table.

[chat]
new = "ctrl+b"            # in place of Ctrl+N
settings = "f2,ctrl+e"    # either of them
compare = ""              # none: from the palette only
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
from textual.binding import Binding, BindingType
from textual.keys import KEY_NAME_REPLACEMENTS, Keys, _character_to_key

from cpuchat.base import paths, toml
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import SettingsError


class Key(msgspec.Struct, frozen=True):
    """One action of the user.

    `id` begins with the place, the owner of the binding: "app", or a screen or widget that asks for its `bindings`.
    `keys` as Textual writes them, `label` the few words of the footer, `help` the line of the help screen and the
    palette. `priority` wins over the focused widget (TextArea has bindings of its own on F6, F7 and others). `words`
    are other words that find it in both: what users call it."""

    id: str
    keys: str
    action: str
    label: str
    help: str
    group: str
    footer: bool = False
    priority: bool = False
    palette: bool = True
    words: str = ""

    @property
    def place(self) -> str:
        return self.id.partition(".")[0]

    @property
    def title(self) -> str:
        """Return its help text without what stands in brackets."""
        return self.help.partition(" (")[0]

    @property
    def found_by(self) -> str:
        """Return the words that find it beside those of its help text."""
        return f"{self.group} {self.label} {self.words}"

    def binding(self) -> Binding:
        keys = self.keys or unbound(self.id)
        return Binding(keys, self.action, self.label, show=self.footer, priority=self.priority, id=self.id)


KEYS: tuple[Key, ...] = msgspec.json.decode(
    Path(__file__).with_name("keys.json").read_bytes(), type=prepared(tuple[Key, ...])
)
"""In the order of the help screen. Keys of lists have priority over the box to type in, which has none of them; Del has
not, as the box lets it through where there is nothing to delete. Ctrl+C is bound by Textual itself, Enter in the places
of a comparison by their list: both are here for footer and help.
"""

_NAMES = {
    "escape": "Esc", "enter": "Enter", "up": "↑", "down": "↓", "pageup": "PgUp", "pagedown": "PgDn",
    "delete": "Del", "slash": "/", "tab": "Tab", "space": "Space", "backspace": "⌫",
    "left": "←", "right": "→", "underscore": "_", "home": "Home", "end": "End",
}  # fmt: skip


_SCREENS = {
    "draft_models": "Draft models", "other_side": "Compare with", "replay": "Recording", "options": "This chat",
    "repository": "Repository", "quantize": "Quantize",
}  # fmt: skip
"""Screens whose keys have a heading of their own: most of them are keys of the list of models, too."""


def heading(key: Key) -> str:
    return _SCREENS.get(key.place, key.group)


def bindings(place: str) -> list[BindingType]:
    return [key.binding() for key in KEYS if key.place == place]


class Keyed:
    """A screen whose class names the place that its keys are of, beside `BINDINGS` of its own."""

    KEYS: ClassVar[str] = ""

    def __init_subclass__(cls, *, keys: str = "", **options: Any) -> None:
        if keys:
            cls.KEYS, own = keys, cls.__dict__.get("BINDINGS", [])
            setattr(cls, "BINDINGS", [*bindings(keys), *own])  # noqa: B010 - Textual merges what each class has
        super().__init_subclass__(**options)


def unbound(id: str) -> str:
    """Return what stands for no key in the binding of an action, so that a keymap finds it: no terminal sends it."""
    return f"unbound-{id}"


def moved(keymap: Mapping[str, str]) -> tuple[Key, ...]:
    """Return the table with the keys that a keymap has by id."""
    return tuple(msgspec.structs.replace(key, keys=keymap.get(key.id, key.keys)) for key in KEYS)


def display(key: str, short: bool = True) -> str:
    """Format a key: `^R` in the footer, `Ctrl+R` in help."""
    *modifiers, name = key.split("+")
    name = _NAMES.get(name, name.upper() if len(name) == 1 and modifiers else name)
    if name[:1] == "f" and name[1:].isdigit():
        name = name.upper()
    if short and modifiers == ["ctrl"]:
        return f"^{name}"
    return "+".join([*(m.capitalize() for m in modifiers), name])


def display_all(keys: str) -> str:
    """Format all keys of one binding, for help: `Ctrl+J, Shift+Enter`."""
    return ", ".join(display(key, short=False) for key in keys.split(",") if key)


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
_WIDEST: Final = 40
"""Characters of a name or key that are shown."""
_MAX_PROBLEMS: Final = 8
_MAX_KEYS: Final = 8
"""Keys of one action."""


class Keymap(NamedTuple):
    """Keys by action, of those that were moved; and what could not be used, in words."""

    moved: dict[str, str]
    problems: tuple[str, ...] = ()


def parse_keys(text: str) -> str:
    """Return keys, separated by commas, by Textual's names: `Ctrl+N, ?` is `ctrl+n,question_mark`. Raises ValueError:
    there is no such key, or they are too many."""
    parts = [part for part in text.replace(" ", "").split(",") if part]
    if len(parts) > _MAX_KEYS:
        raise ValueError(f"more than {_MAX_KEYS} keys")
    found: list[str] = []
    for part in parts:
        head, plus, name = part[:-1].rpartition("+")  # the last character may be a plus itself
        name += part[-1]
        modifiers = head.lower().split("+") if plus else []
        if len(name) == 1:
            name = _character_to_key(name.lower() if modifiers else name)
        else:
            name = _ALIASES.get(name.lower(), name.lower())
        if not set(modifiers) <= _MODIFIERS or not (name in _NAMED or _is_typed(name)):
            raise ValueError(f"no key {part[:_WIDEST]!r} (try ctrl+b, f6 or alt+left)")
        found.append("+".join((*modifiers, name)))
    return ",".join(dict.fromkeys(found))


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
    """Return why an action cannot have the keys `wanted`, "" if it can: one is typed as text, or is taken by an action
    at a place that meets its own. What both have by default is not taken. `moved`: the other actions that were
    moved."""
    parts = set(wanted.split(",")) - {""}
    if key.priority or key.place in _TYPED:
        for one in filter(_is_typed, parts):
            return f"{display(one, short=False)} is typed as text"
    taken: list[str] = []
    for other in KEYS:
        if other.id != key.id and _meet(key.place, other.place):
            by_default = set(key.keys.split(",")) & set(other.keys.split(","))
            for one in sorted(parts & set(moved.get(other.id, other.keys).split(",")) - by_default):
                taken.append(f"{display(one, short=False)} is taken by “{other.title}” ({other.id})")
    return "; ".join(taken)


def _meet(one: str, other: str) -> bool:
    """Return whether keys of two places can be pressed at the same time."""
    pair = {one, other}
    in_chat = pair <= _CHAT and ("chat" in pair or pair == {"transcript", "branches"})
    return len(pair) == 1 or in_chat or "app" in pair or bool(pair & {"list", "details"} and not pair & _CHAT)


def load_keymap() -> Keymap:
    """Read the file. What cannot be used is left out: its actions keep their keys."""
    file = paths.keymap_file()
    try:
        tables = toml.parse(toml.read(file), file.name)
    except SettingsError as error:
        return Keymap({}, (error.message,))
    known = {key.id: key for key in KEYS}
    moved: dict[str, str] = {}
    problems: list[str] = []
    for place, table in tables.items():
        for name, text in table.items() if isinstance(table, dict) else [("", table)]:
            id = f"{place}.{name}".rstrip(".")
            try:
                if id not in known:
                    raise ValueError("no such action")
                if not isinstance(text, str):
                    raise ValueError('needs keys in quotes, such as "ctrl+b"')
                moved[id] = parse_keys(text)
            except ValueError as error:
                problems.append(f"{id[:_WIDEST]}: {error}")
    # What an action gets back by default may conflict again.
    while wrong := next(
        ((id, why) for id in reversed(moved) if (why := problem_with(known[id], moved[id], moved))), None
    ):
        problems.append(": ".join(wrong))
        del moved[wrong[0]]
    if (more := len(problems) - _MAX_PROBLEMS) > 1:
        problems[_MAX_PROBLEMS:] = [f"and {more} more"]
    return Keymap(moved, tuple(problems))
