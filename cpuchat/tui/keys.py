"""Every key of the app, in one table: bindings, footer, help and palette are made from it.

Each has an id, so that a keymap (`App.set_keymap`) can move it to another key.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding, BindingType

# Groups in the order in which help shows them.
WRITE, ANSWER, CHATS, VIEW, APP, MODELS, HARDWARE, SETTINGS, DIALOG = (
    "Write", "Answer", "Chats", "View", "App", "Models", "Hardware", "Settings", "Dialogs"
)  # fmt: skip


@dataclass(frozen=True)
class Key:
    """One thing the user can do.

    `place` is who owns the binding ("app", "chat", "prompt", "chats", "models", "hardware", "settings", "help",
    "dialog"), `keys` as Textual writes them, `label` the few words of the footer, `help` the line of the help screen
    and the palette. `priority` wins over the focused widget (TextArea has bindings of its own on F6, F7 and others).
    """

    place: str
    id: str
    keys: str
    action: str
    label: str
    help: str
    group: str
    footer: bool = False
    priority: bool = False
    palette: bool = True

    def binding(self) -> Binding:
        return Binding(self.keys, self.action, self.label, show=self.footer, priority=self.priority, id=self.id)


KEYS: tuple[Key, ...] = (
    Key("prompt", "prompt.send", "enter", "submit", "send", "Send the message", WRITE, priority=True, palette=False),
    Key("prompt", "prompt.newline", "ctrl+j,shift+enter", "newline", "new line", "New line in the message", WRITE,
        priority=True, palette=False),
    Key("prompt", "prompt.older", "up", "older", "older", "On the first line: an earlier message of mine", WRITE,
        palette=False),
    Key("prompt", "prompt.newer", "down", "newer", "newer", "On the last line: a later one", WRITE, palette=False),
    Key("chat", "chat.stop", "escape", "stop", "stop", "Stop the answer or the load (what was said stays)", ANSWER,
        footer=True),
    Key("chat", "chat.again", "ctrl+r", "again", "again", "Write the last answer again", ANSWER, footer=True,
        priority=True),
    Key("chat", "chat.new", "ctrl+n", "new_chat", "new chat", "Start a new chat", CHATS, footer=True, priority=True),
    Key("chat", "chat.models", "ctrl+o", "models", "models", "Choose a model", APP, footer=True, priority=True),
    Key("app", "app.commands", "ctrl+p", "command_palette", "commands", "Search all commands", APP, footer=True,
        priority=True, palette=False),
    Key("app", "app.help", "f1", "help", "help", "Help: keys, and what the figures mean", APP, priority=True),
    Key("chat", "chat.settings", "f2", "settings", "settings", "Settings: sampling, drafting, engine, look", APP,
        priority=True),
    Key("chat", "chat.hardware", "f12", "hardware", "hardware",
        "Hardware: the machine, cores in use, memory policy, read bandwidth", APP, priority=True),
    Key("chat", "chat.telemetry", "f3", "telemetry", "figures", "Show or hide the figures", VIEW, priority=True),
    Key("chat", "chat.edit", "f4", "edit_last", "edit", "Edit my last message and ask again from there", ANSWER,
        priority=True),
    Key("chat", "chat.copy", "f5", "copy_answer", "copy", "Copy the last answer, or the marked message", ANSWER,
        priority=True),
    Key("chat", "chat.copy_code", "f6", "copy_code", "copy code",
        "Copy the last code block; press again for the one before", ANSWER, priority=True),
    Key("chat", "chat.drafting", "f9", "drafting", "drafting",
        "Switch drafting off or on, from the next answer", ANSWER, priority=True),
    Key("chat", "chat.color_drafts", "ctrl+t", "color_drafts", "who drafted",
        "Mark the answers' text by who proposed it", VIEW, priority=True),
    Key("chat", "chat.reasoning", "f7", "reasoning", "reasoning", "Fold or unfold what the model thought", VIEW,
        priority=True),
    Key("chat", "chat.sidebar", "f8", "sidebar", "chats", "Show or hide the chats", VIEW, priority=True),
    # Bound by the transcript itself; here for the help screen.
    Key("transcript", "transcript.previous", "k,alt+up", "previous_message", "before",
        "In the transcript: mark the message before", VIEW, palette=False),
    Key("transcript", "transcript.next", "j,alt+down", "next_message", "after",
        "In the transcript: mark the message after", VIEW, palette=False),
    Key("chat", "chat.rename", "", "rename_chat", "rename", "Rename this chat", CHATS),
    Key("chat", "chat.delete", "", "delete_chat", "delete", "Delete this chat", CHATS),
    Key("chats", "chats.rename", "r", "rename", "rename", "In the list of chats: rename", CHATS, palette=False),
    Key("chats", "chats.delete", "d,delete", "delete", "delete", "In the list of chats: delete", CHATS, palette=False),
    Key("chats", "chats.search", "slash", "search", "search", "In the list of chats: search", CHATS, palette=False),
    Key("app", "app.theme", "", "change_theme", "theme", "Change the theme, with a preview", VIEW),
    Key("app", "app.screenshot", "", "screenshot", "screenshot", "Save a picture of the screen (SVG)", APP),
    Key("app", "app.quit", "ctrl+q", "quit", "quit", "Quit; what was said is kept", APP, priority=True),
    Key("models", "models.load", "enter", "load", "load", "Load the marked model", MODELS, footer=True, priority=True),
    Key("models", "models.up", "up", "move(-1)", "up", "Mark the one above", MODELS, priority=True, palette=False),
    Key("models", "models.down", "down", "move(1)", "down", "Mark the one below", MODELS, priority=True,
        palette=False),
    Key("models", "models.page_up", "pageup", "move(-8)", "page up", "Eight up", MODELS, priority=True,
        palette=False),
    Key("models", "models.page_down", "pagedown", "move(8)", "page down", "Eight down", MODELS, priority=True,
        palette=False),
    Key("models", "models.rescan", "ctrl+r", "rescan", "look again", "Look for models again", MODELS, footer=True,
        priority=True),
    Key("models", "models.close", "escape", "close", "back", "Back to the chat", MODELS, footer=True),
    Key("hardware", "hardware.apply", "enter", "apply", "use it",
        "Use the marked layout: measured before and after, the chat goes on", HARDWARE, footer=True, priority=True),
    Key("hardware", "hardware.undo", "u", "undo", "go back", "Go back to the layout before", HARDWARE, footer=True),
    Key("hardware", "hardware.recommended", "t", "recommended", "recommended", "Mark the recommended layout",
        HARDWARE, footer=True),
    Key("hardware", "hardware.measure", "m", "measure", "measure", "Measure the read bandwidth (under 15 seconds)",
        HARDWARE, footer=True),
    Key("hardware", "hardware.close", "escape", "close", "back", "Stop what is measured or loaded; back to the chat",
        HARDWARE, footer=True),
    Key("settings", "settings.save", "ctrl+s", "save", "save", "Save the settings", SETTINGS, footer=True,
        priority=True),
    Key("settings", "settings.defaults", "ctrl+d", "defaults", "default", "Put this field back to its default",
        SETTINGS, footer=True, priority=True),
    Key("settings", "settings.close", "escape", "close", "back", "Back to the chat", SETTINGS, footer=True),
    Key("help", "help.close", "escape,f1,q", "close", "back", "Back", DIALOG, footer=True, palette=False),
    Key("dialog", "dialog.cancel", "escape", "cancel", "cancel", "Leave a dialog", DIALOG, palette=False),
)  # fmt: skip

_NAMES = {
    "escape": "Esc", "enter": "Enter", "up": "↑", "down": "↓", "pageup": "PgUp", "pagedown": "PgDn",
    "delete": "Del", "slash": "/", "tab": "Tab", "space": "Space", "backspace": "⌫",
}  # fmt: skip


def bindings(place: str) -> list[BindingType]:
    """The bindings that a screen or widget declares."""
    return [key.binding() for key in KEYS if key.place == place and key.keys]


def display(key: str, short: bool = True) -> str:
    """A key as people write it: `^R` in the footer, `Ctrl+R` in help."""
    *modifiers, name = key.split("+")
    name = _NAMES.get(name, name.upper() if len(name) == 1 and modifiers else name)
    if name[:1] == "f" and name[1:].isdigit():
        name = name.upper()
    if short and modifiers == ["ctrl"]:
        return f"^{name}"
    return "+".join([*(m.capitalize() for m in modifiers), name])


def display_all(keys: str) -> str:
    """All keys of one binding, for help: `Ctrl+J, Shift+Enter`."""
    return ", ".join(display(key, short=False) for key in keys.split(",") if key)
