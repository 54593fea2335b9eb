"""Every key of the app, in one table: bindings, footer, help and palette are made from it.

Each has an id, by which the user can move it to another key: `keymap.toml` in the config folder has a table for each
place of the key table.

[chat]
new = "ctrl+b"            # in place of Ctrl+N
settings = "f2,ctrl+e"    # either of them
compare = ""              # none: from the palette only
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple

from textual.binding import Binding, BindingType
from textual.keys import KEY_NAME_REPLACEMENTS, Keys, _character_to_key

from cpuchat.base import paths, toml
from cpuchat.base.errors import SettingsError

# Groups in the order in which help shows them.
WRITE, ANSWER, CHATS, VIEW, APP, MODELS, DOWNLOADS, COMPARE, HARDWARE, SETTINGS, DIALOG = (
    "Write", "Answer", "Chats", "View", "App", "Models", "Downloads", "Compare", "Hardware", "Settings", "Dialogs"
)  # fmt: skip


@dataclass(frozen=True)
class Key:
    """One action of the user.

    `id` begins with the place, the owner of the binding: "app", or a screen or widget that asks for its `bindings`.
    `keys` as Textual writes them, `label` the few words of the footer, `help` the line of the help screen and the
    palette. `priority` wins over the focused widget (TextArea has bindings of its own on F6, F7 and others). `words`
    are other words that find it in both: what users call it.
    """

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
    def found_by(self) -> str:
        """Return the words that find it beside those of its help text."""
        return f"{self.group} {self.label} {self.words}"

    def binding(self) -> Binding:
        keys = self.keys or unbound(self.id)
        return Binding(keys, self.action, self.label, show=self.footer, priority=self.priority, id=self.id)


KEYS: tuple[Key, ...] = (
    Key("prompt.send", "enter", "submit", "send", "Send the message", WRITE, priority=True, palette=False),
    Key("prompt.newline", "ctrl+j,shift+enter,alt+enter", "newline", "new line", "Insert a new line", WRITE,
        priority=True, palette=False),
    Key("prompt.complete", "tab", "complete", "complete", "Complete a file to send (@) or a command (/)", WRITE,
        palette=False),
    Key("prompt.older", "up", "older", "older", "On the first line: recall the previous message", WRITE, palette=False),
    Key("prompt.newer", "down", "newer", "newer", "On the last line: recall the next message", WRITE, palette=False),
    Key("prompt.undo", "ctrl+underscore,ctrl+slash", "undo", "undo", "Undo the last edit", WRITE, palette=False),
    Key("prompt.page_up", "pageup", "page(-1)", "page up", "Scroll up a page in a long message, then in the chat", VIEW,
        palette=False),
    Key("prompt.page_down", "pagedown", "page(1)", "page down",
        "Scroll down a page in a long message, then in the chat", VIEW, palette=False),
    Key("prompt.top", "ctrl+home", "edge(-1)", "top", "Go to the start of the message, then of the chat", VIEW,
        palette=False),
    Key("prompt.bottom", "ctrl+end", "edge(1)", "bottom", "Go to the end of the message, then of the chat", VIEW,
        palette=False),
    Key("chat.stop", "escape", "stop", "stop", "Stop (keeps the partial answer)", ANSWER, footer=True),
    Key("chat.regenerate", "ctrl+r", "regenerate", "regenerate", "Regenerate", ANSWER, footer=True, priority=True,
        words="retry again redo another answer"),
    Key("chat.continue", "alt+r", "continue_answer", "continue", "Continue a stopped or edited answer", ANSWER,
        priority=True, words="resume go on"),
    Key("chat.new", "ctrl+n", "new_chat", "new chat", "Start a new chat", CHATS, footer=True, priority=True),
    Key("chat.models", "ctrl+o", "models", "models", "Choose, download or delete models", APP, footer=True,
        priority=True, words="load switch llm gguf hugging face quantize remove"),
    Key("chat.compare", "ctrl+l", "compare", "compare", "Compare two quantizations of the model, side by side", COMPARE,
        footer=True, priority=True),
    Key("app.commands", "ctrl+p", "command_palette", "commands", "Open the command palette", APP, footer=True,
        priority=True, palette=False),
    Key("app.help", "f1", "help", "help", "Explain keys and figures", APP, priority=True,
        words="help keys shortcuts manual ?"),
    Key("chat.downloads", "ctrl+g", "downloads", "downloads", "Pause, resume, cancel or load downloads", APP,
        priority=True),
    Key("chat.settings", "f2", "settings", "settings", "Change settings", APP, priority=True,
        words="preferences options configuration temperature sampling top_p top_k seed system prompt max tokens"),
    Key("chat.hardware", "f12", "hardware", "hardware", "Show topology, placement and read bandwidth", APP,
        priority=True, words="cpu cores numa memory ram machine"),
    Key("chat.telemetry", "f3", "telemetry", "figures", "Cycle the figures: in brief, all, hidden", VIEW, priority=True,
        words="panel statistics stats speed tok/s telemetry"),
    Key("chat.edit", "f4", "edit", "edit", "Edit the last or selected message and regenerate, or the selected answer",
        ANSWER, priority=True),
    Key("chat.branch_previous", "alt+left", "branch(-1)", "previous answer", "Previous answer", ANSWER, priority=True,
        words="branch alternative version"),
    Key("chat.branch_next", "alt+right", "branch(1)", "next answer", "Next answer", ANSWER, priority=True,
        words="branch alternative version"),
    Key("chat.answer_now", "f10", "answer_now", "answer now", "Answer now (ends the reasoning)", ANSWER, priority=True),
    Key("chat.compact", "", "compact", "summarize", "Summarize the chat (frees context; /compact)", ANSWER),
    Key("chat.reasoning", "", "chat_reasoning", "reasoning", "Choose reasoning for this chat…", CHATS,
        words="thinking think effort"),
    Key("chat.system_prompt", "alt+s", "system_prompt", "system prompt", "Edit the system prompt of this chat", CHATS,
        priority=True, words="instructions persona role"),
    Key("chat.preset", "", "preset", "preset", "Choose a preset for this chat…", CHATS),
    Key("chat.tools", "", "tools", "tools", "Let the model read files in a folder…", CHATS),
    Key("chat.forget_approvals", "", "forget_approvals", "ask again", "Ask again before every tool call", CHATS),
    Key("chat.tool_servers", "", "tool_servers", "servers", "Start or end an MCP server…", CHATS),
    Key("chat.save_preset", "", "save_preset", "save preset", "Save as a preset…", CHATS),
    Key("chat.copy", "f5", "copy_answer", "copy", "Copy the last answer or the selected message (Markdown)", ANSWER,
        priority=True, words="clipboard"),
    Key("chat.copy_code", "f6", "copy_code", "copy code",
        "Copy a code block of the last answer or the selected message; again: the previous one", ANSWER, priority=True,
        words="clipboard snippet"),
    Key("chat.drafting", "f9", "drafting", "drafting", "Cycle drafting: auto, always, off; from the next answer",
        ANSWER, priority=True),
    Key("chat.color_drafts", "ctrl+t", "color_drafts", "color drafts", "Toggle colors of drafted tokens", VIEW,
        priority=True),
    Key("chat.speak", "ctrl+s", "speak", "speak", "Toggle reading answers aloud while they are written (Esc stops)",
        ANSWER, priority=True, words="voice speech sound tts"),
    Key("chat.read", "", "read_answer", "read aloud", "Read the last answer or the selected message aloud", ANSWER,
        words="voice speech sound tts speak"),
    Key("chat.unfold", "f7", "reasoning", "reasoning", "Toggle reasoning and attachments", VIEW, priority=True),
    Key("chat.sidebar", "f8", "sidebar", "chats", "Toggle the chat list", VIEW, priority=True,
        words="history sidebar conversations"),
    Key("transcript.previous", "k,alt+up", "previous_message", "previous",
        "In the transcript: select the previous message", VIEW, footer=True, palette=False),
    Key("transcript.next", "j,alt+down", "next_message", "next", "In the transcript: select the next message", VIEW,
        footer=True, palette=False),
    Key("branches.previous", "left,h", "screen.branch(-1)", "previous answer", "In the transcript: previous answer",
        VIEW, palette=False),
    Key("branches.next", "right,l", "screen.branch(1)", "next answer", "In the transcript: next answer", VIEW,
        palette=False),
    Key("branches.fork", "f", "screen.fork", "fork", "In the transcript: fork the chat from here", CHATS, footer=True,
        palette=False),
    Key("branches.delete", "d,delete", "screen.delete_message", "delete",
        "In the transcript: delete the message and what follows", CHATS, footer=True, palette=False),
    Key("branches.undo", "u", "screen.undo_delete", "undo delete", "In the transcript: undo the last delete", CHATS,
        palette=False),
    Key("chat.fork", "", "fork", "fork", "Fork this chat from the last or the selected message", CHATS),
    Key("chat.undo_delete", "", "undo_delete", "undo delete", "Undo the last delete", CHATS),
    Key("chat.export", "", "export_chat", "export", "Export this chat to Markdown or JSON", CHATS),
    Key("chat.rename", "", "rename_chat", "rename", "Rename this chat", CHATS),
    Key("chat.pin", "", "pin_chat", "pin", "Pin or unpin this chat", CHATS),
    Key("chat.delete", "", "delete_chat", "delete", "Delete this chat", CHATS),
    Key("chats.rename", "r", "rename", "rename", "In the chat list: rename", CHATS, footer=True, palette=False),
    Key("chats.pin", "p", "pin", "pin", "In the chat list: pin or unpin (listed first)", CHATS, footer=True,
        palette=False),
    Key("chats.delete", "d,delete", "delete", "delete", "In the chat list: delete", CHATS, footer=True, palette=False),
    Key("chats.undo", "u", "screen.undo_delete", "undo delete", "In the chat list: undo the last delete", CHATS,
        palette=False),
    Key("chats.search", "slash", "search", "search", "In the chat list: search", CHATS, footer=True, palette=False),
    Key("app.theme", "", "change_theme", "theme", "Change theme", VIEW, words="dark light mode colors appearance"),
    Key("app.tune", "", "tune", "tune", "Tune the settings for the loaded model (3 minutes)", APP,
        words="optimize benchmark faster fastest threads"),
    Key("app.screenshot", "", "screenshot", "screenshot", "Save a screenshot (SVG)", APP),
    Key("app.suspend", "ctrl+z", "suspend_process", "suspend", "Suspend (`fg` resumes)", APP, priority=True,
        palette=False),
    # Bound by Textual itself; here for the help screen.
    Key("app.interrupt", "ctrl+c", "help_quit", "stop", "Copy the selection, or stop the answer; twice: quit", APP,
        palette=False),
    Key("app.quit", "ctrl+q", "quit", "quit", "Quit (chats are saved)", APP, priority=True, words="exit close bye"),
    # Screens with a list that keeps no focus; before a box to type in, which has none of these keys.
    Key("list.up", "up", "move(-1)", "up", "In a list: select the previous line", MODELS, priority=True, palette=False),
    Key("list.down", "down", "move(1)", "down", "In a list: select the next line", MODELS, priority=True,
        palette=False),
    Key("list.page_up", "pageup", "page(-1)", "page up", "In a list: scroll up a page", MODELS, priority=True,
        palette=False),
    Key("list.page_down", "pagedown", "page(1)", "page down", "In a list: scroll down a page", MODELS, priority=True,
        palette=False),
    Key("details.up", "shift+up", "scroll_details(-1)", "details up", "Scroll the details up", MODELS, priority=True,
        palette=False),
    Key("details.down", "shift+down", "scroll_details(1)", "details down", "Scroll the details down", MODELS,
        priority=True, palette=False),
    Key("models.choose", "enter", "choose", "open", "Load the model, or show its files", MODELS, footer=True,
        priority=True),
    Key("models.search", "ctrl+s", "search", "search Hugging Face", "Search Hugging Face", MODELS, footer=True,
        priority=True),
    Key("models.drafts", "ctrl+l", "drafts", "drafts", "Choose a draft model for the loaded model", MODELS, footer=True,
        priority=True),
    Key("models.tune", "f6", "tune", "tune", "Find the fastest settings for the model (3 minutes)", MODELS,
        priority=True),
    Key("models.quantize", "f5", "quantize", "quantize", "Quantize the model", MODELS, priority=True),
    # Not before the box to type in: it lets Del through where there is nothing to delete.
    Key("models.delete", "delete,f8", "delete", "delete", "Delete the model from disk", MODELS),
    Key("models.downloads", "ctrl+g", "downloads", "downloads", "Show all downloads", MODELS, priority=True),
    Key("models.rescan", "ctrl+r", "rescan", "refresh", "Refresh the list", MODELS, priority=True),
    Key("models.close", "escape", "close", "back", "Back to the chat", MODELS, footer=True),
    Key("draft_models.use", "enter", "use", "use", "Use this draft model; downloads it first if needed", MODELS,
        footer=True, priority=True),
    Key("draft_models.close", "escape", "close", "back", "Back to the models", MODELS, footer=True),
    Key("repository.choose", "enter", "choose", "download, load", "Download the model, or load it", DOWNLOADS,
        footer=True, priority=True),
    Key("repository.hold", "space", "hold", "pause", "Pause or resume its download", DOWNLOADS, footer=True),
    Key("repository.downloads", "ctrl+g", "downloads", "downloads", "Show all downloads", DOWNLOADS, footer=True,
        priority=True),
    Key("repository.again", "ctrl+r", "again", "refresh", "Refresh from Hugging Face", DOWNLOADS, priority=True),
    Key("repository.close", "escape", "close", "back", "Back (downloads continue)", DOWNLOADS, footer=True),
    Key("downloads.load", "enter", "load", "load, retry", "Load the model, or retry a failed download", DOWNLOADS,
        footer=True, priority=True),
    Key("downloads.hold", "space", "hold", "pause, resume", "Pause or resume the download", DOWNLOADS, footer=True),
    Key("downloads.cancel", "delete,d", "cancel", "cancel", "Remove the download from the list", DOWNLOADS,
        footer=True),
    Key("downloads.close", "escape,ctrl+g", "close", "back", "Back (downloads continue)", DOWNLOADS, footer=True),
    Key("quantize.make", "enter", "make", "quantize", "Quantize to this type", MODELS, footer=True, priority=True,
        palette=False),
    Key("quantize.stop", "f8", "stop", "stop", "Stop quantizing", MODELS, footer=True, priority=True, palette=False),
    Key("quantize.close", "escape", "close", "back", "Back to the models (quantizing continues)", MODELS, footer=True,
        palette=False),
    Key("compare.next", "n", "next", "next prompt", "Send the next prompt to both", COMPARE, footer=True),
    Key("compare.repeat", "ctrl+r", "repeat", "repeat",
        "Repeat with sides swapped (from three rounds on: medians and ranges)", COMPARE, footer=True, priority=True),
    Key("compare.table", "t", "table", "table", "Show all figures as a table, or the stage again", COMPARE),
    Key("compare.replay", "space", "replay", "replay", "Replay both answers on one clock", COMPARE, words="race"),
    # Enter is bound by the list itself; here for footer and help.
    Key("compare.agreement", "a", "agreement", "agreement",
        "List the places where the other would have written something else (again: the stage)", COMPARE, footer=True,
        words="agree probability tokens differ"),
    Key("places.choose", "enter", "select", "go there", "In the places that matter: go there, with both candidates",
        COMPARE, footer=True, palette=False),
    Key("compare.draft", "d", "draft", "draft model", "Use the smaller file as the draft model of the larger one",
        COMPARE, words="draft speculation"),
    Key("compare.other", "tab", "other", "other side", "Go to the other side", COMPARE),
    Key("compare.export", "e", "export", "export", "Export to Markdown", COMPARE),
    Key("compare.close", "escape", "close", "back", "Stop (keeps what is written), or back to the chat", COMPARE,
        footer=True),
    Key("replay.replay", "space,ctrl+r", "replay", "replay", "Replay the recording", COMPARE, footer=True,
        palette=False),
    Key("replay.models", "ctrl+o,enter", "models", "your own model", "Open your own model", COMPARE, footer=True,
        priority=True, palette=False),
    Key("replay.close", "escape", "close", "back", "Back to the chat", COMPARE, footer=True, palette=False),
    Key("other_side.choose", "enter", "choose", "compare", "Compare with this", COMPARE, footer=True, priority=True,
        palette=False),
    Key("other_side.close", "escape", "close", "back", "Back to the chat", COMPARE, footer=True, palette=False),
    Key("hardware.apply", "enter", "apply", "apply", "Load the model in this placement", HARDWARE, footer=True,
        priority=True),
    Key("hardware.undo", "u", "undo", "undo", "Revert to the previous placement", HARDWARE, footer=True),
    Key("hardware.recommended", "t", "recommended", "recommended", "Select the recommended placement", HARDWARE,
        footer=True),
    Key("hardware.close", "escape", "close", "back", "Stop loading, or back to the chat", HARDWARE, footer=True),
    Key("settings.save", "ctrl+s", "save", "save", "Save the settings", SETTINGS, footer=True, priority=True),
    Key("settings.defaults", "ctrl+d", "defaults", "reset", "Reset this field to its default", SETTINGS, footer=True,
        priority=True),
    Key("settings.undo_tuning", "f8", "undo_tuning", "undo tuning", "Undo what tuning found for the loaded model",
        SETTINGS, footer=True, priority=True),
    Key("settings.next_tab", "ctrl+pagedown,f6", "tab(1)", "next tab", "Show the next tab", SETTINGS, footer=True,
        priority=True, palette=False),
    Key("settings.previous_tab", "ctrl+pageup,f5", "tab(-1)", "previous tab", "Show the previous tab", SETTINGS,
        priority=True, palette=False),
    Key("settings.close", "escape", "close", "back", "Back to the chat", SETTINGS, footer=True),
    Key("help.close", "escape,f1", "close", "back", "Back", DIALOG, footer=True, palette=False),
    Key("tune.close", "escape", "close", "close", "Stop tuning, or close", DIALOG, palette=False),
    Key("dialog.cancel", "escape", "cancel", "cancel", "Close the dialog", DIALOG, palette=False),
)  # fmt: skip

_NAMES = {
    "escape": "Esc", "enter": "Enter", "up": "↑", "down": "↓", "pageup": "PgUp", "pagedown": "PgDn",
    "delete": "Del", "slash": "/", "tab": "Tab", "space": "Space", "backspace": "⌫",
    "left": "←", "right": "→", "underscore": "_", "home": "Home", "end": "End",
}  # fmt: skip


_SCREENS = {
    "draft_models": "Draft models",
    "tune": "Tune",
    "other_side": "Compare with",
    "replay": "Recording",
    "repository": "Repository",
    "quantize": "Quantize",
}
"""Screens whose keys have a heading of their own: most of them are keys of the list of models, too."""


def heading(key: Key) -> str:
    """Return the heading of a key in help."""
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


def find(id: str) -> Key | None:
    """Return the key of that id."""
    return next((key for key in KEYS if key.id == id), None)


def moved(keymap: Mapping[str, str]) -> tuple[Key, ...]:
    """Return the table with the keys that a keymap has by id."""
    return tuple(replace(key, keys=keymap[key.id]) if key.id in keymap else key for key in KEYS)


def renamed(text: str, keymap: Mapping[str, str]) -> str:
    """Return a text with the keys that were moved as they are now. Letters stay, as they may be words, and so do keys
    that several actions have by default: it is not known which of them is meant.
    """
    if not keymap:
        return text
    taken = Counter(one for one, _ in {(one, key.action) for key in KEYS for one in key.keys.split(",")})
    now = {
        display(one, short=False): display(keymap[key.id].partition(",")[0], short=False) or "the palette"
        for key in KEYS
        for one in key.keys.split(",")
        if key.id in keymap and len(one) > 1 and taken[one] == 1
    }
    return re.sub(r"[\w+]+", lambda found: now.get(found[0], found[0]), text)


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
_KNOWN: Final = {key.id: key for key in KEYS}
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
    """Return keys, separated by commas, by Textual's names: `Ctrl+N, ?` is `ctrl+n,question_mark`.

    Raises:
        ValueError: there is no such key, or they are too many.
    """
    parts = [part for part in text.replace(" ", "").split(",") if part]
    if len(parts) > _MAX_KEYS:
        raise ValueError(f"more than {_MAX_KEYS} keys")
    return ",".join(dict.fromkeys(map(_parse_key, parts)))


def _parse_key(text: str) -> str:
    head, plus, name = text[:-1].rpartition("+")  # the last character may be a plus itself
    name += text[-1]
    modifiers = head.lower().split("+") if plus else []
    if len(name) == 1:
        name = _character_to_key(name.lower() if modifiers else name)
    else:
        name = _ALIASES.get(name.lower(), name.lower())
    if not set(modifiers) <= _MODIFIERS or not (name in _NAMED or _is_typed(name)):
        raise ValueError(f"no key {text[:_WIDEST]!r} (try ctrl+b, f6 or alt+left)")
    return "+".join((*modifiers, name))


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
                return f"{display(one, short=False)} is typed as text"
    taken = [
        f"{display(one, short=False)} is taken by “{other.help.partition(' (')[0]}” ({other.id})"
        for other in KEYS
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
        tables = toml.parse(toml.read(file), file.name)
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
    if (more := len(problems) - _MAX_PROBLEMS) > 1:
        problems[_MAX_PROBLEMS:] = [f"and {more} more"]
    return Keymap(moved, tuple(problems))


def _without_conflicts(moved: dict[str, str]) -> list[str]:
    """Leave out what cannot be, the last first, and return why. Its defaults may conflict again: repeat until none."""
    problems: list[str] = []
    for id in reversed(list(moved)):
        if problem := problem_with(_KNOWN[id], moved[id], moved):
            problems.append(f"{id}: {problem}")
            del moved[id]
    return problems
