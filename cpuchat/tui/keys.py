"""Every key of the app, in one table: bindings, footer, help and palette are made from it.

Each has an id, so that a keymap (`App.set_keymap`) can move it to another key.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding, BindingType

# Groups in the order in which help shows them.
WRITE, ANSWER, CHATS, VIEW, APP, MODELS, DOWNLOADS, HARDWARE, SETTINGS, DIALOG = (
    "Write", "Answer", "Chats", "View", "App", "Models", "Downloads", "Hardware", "Settings", "Dialogs"
)  # fmt: skip


@dataclass(frozen=True)
class Key:
    """One thing the user can do.

    `place` is who owns the binding: "app", or a screen or widget that asks for its `bindings`. `keys` as Textual writes
    them, `label` the few words of the footer, `help` the line of the help screen
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
    Key("prompt", "prompt.undo", "ctrl+underscore,ctrl+slash", "undo", "undo", "Undo the last change of the message",
        WRITE, palette=False),
    Key("prompt", "prompt.page_up", "pageup", "page(-1)", "page up",
        "Scroll the chat up; a message longer than its box is scrolled first", VIEW, palette=False),
    Key("prompt", "prompt.page_down", "pagedown", "page(1)", "page down", "The same: down", VIEW, palette=False),
    Key("prompt", "prompt.top", "ctrl+home", "edge(-1)", "top", "To the start of the message, then of the chat", VIEW,
        palette=False),
    Key("prompt", "prompt.bottom", "ctrl+end", "edge(1)", "bottom", "To the end of the message, then of the chat", VIEW,
        palette=False),
    Key("chat", "chat.stop", "escape", "stop", "stop", "Stop the answer or the load (what was said stays)", ANSWER,
        footer=True),
    Key("chat", "chat.again", "ctrl+r", "again", "again", "Write the last answer again", ANSWER, footer=True,
        priority=True),
    Key("chat", "chat.new", "ctrl+n", "new_chat", "new chat", "Start a new chat", CHATS, footer=True, priority=True),
    Key("chat", "chat.models", "ctrl+o", "models", "models", "Choose a model", APP, footer=True, priority=True),
    Key("app", "app.commands", "ctrl+p", "command_palette", "commands", "Search all commands", APP, footer=True,
        priority=True, palette=False),
    Key("app", "app.help", "f1", "help", "help", "Help: keys, and what the figures mean", APP, priority=True),
    Key("chat", "chat.downloads", "ctrl+g", "downloads", "downloads", "Downloads: how far, pause, cancel, load", APP,
        priority=True),
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
    Key("app", "app.suspend", "ctrl+z", "suspend_process", "suspend", "Suspend; `fg` in the shell comes back", APP,
        priority=True, palette=False),
    # Bound by Textual itself; here for the help screen.
    Key("app", "app.interrupt", "ctrl+c", "help_quit", "stop", "Copy the selection; else stop the answer; twice: quit",
        APP, palette=False),
    Key("app", "app.quit", "ctrl+q", "quit", "quit", "Quit; what was said is kept", APP, priority=True),
    # Screens with a list that keeps no focus; before a box to type in, which has none of these keys.
    Key("list", "list.up", "up", "move(-1)", "up", "In a list: mark the one above", MODELS, priority=True,
        palette=False),
    Key("list", "list.down", "down", "move(1)", "down", "In a list: mark the one below", MODELS, priority=True,
        palette=False),
    Key("list", "list.page_up", "pageup", "page(-1)", "page up", "In a list: a page up", MODELS, priority=True,
        palette=False),
    Key("list", "list.page_down", "pagedown", "page(1)", "page down", "In a list: a page down", MODELS, priority=True,
        palette=False),
    Key("details", "details.up", "shift+up", "scroll_details(-1)", "details up",
        "Beside or below a list: scroll up in what is known of the marked one", MODELS, priority=True, palette=False),
    Key("details", "details.down", "shift+down", "scroll_details(1)", "details down", "The same: scroll down", MODELS,
        priority=True, palette=False),
    Key("models", "models.choose", "enter", "choose", "choose", "Load the marked model, or go on to what it offers",
        MODELS, footer=True, priority=True),
    Key("models", "models.search", "ctrl+s", "search", "search hub", "Search Hugging Face for what is typed", MODELS,
        footer=True, priority=True),
    Key("models", "models.inspect", "f3", "inspect", "inspect", "Show everything that the model's header says", MODELS,
        footer=True, priority=True),
    Key("models", "models.drafts", "ctrl+l", "drafts", "drafts",
        "What could draft for the loaded model, and what it would gain", MODELS, footer=True, priority=True),
    Key("models", "models.quantize", "f5", "quantize", "quantize", "Make a smaller copy of the marked model", MODELS,
        priority=True),
    # Not before the box to type in: it lets Del through where there is nothing to delete.
    Key("models", "models.delete", "delete,f8", "delete", "delete", "Delete the marked model from the disk", MODELS),
    Key("models", "models.downloads", "ctrl+g", "downloads", "downloads", "All downloads", MODELS, priority=True),
    Key("models", "models.rescan", "ctrl+r", "rescan", "look again", "Look for models again", MODELS, priority=True),
    Key("models", "models.close", "escape", "close", "back", "Back to the chat", MODELS, footer=True),
    Key("inspection", "inspection.close", "escape,f3", "close", "back", "Back to the models", MODELS, footer=True,
        palette=False),
    Key("draft_models", "draft_models.use", "enter", "use", "use it",
        "Draft with the marked model from now on; it is downloaded if need be", MODELS, footer=True, priority=True),
    Key("draft_models", "draft_models.close", "escape", "close", "back", "Back to the models", MODELS, footer=True),
    Key("repository", "repository.choose", "enter", "choose", "get or load",
        "Download the marked model of a repository, or load it when it is here", DOWNLOADS, footer=True, priority=True),
    Key("repository", "repository.hold", "space", "hold", "pause", "Pause the marked one's download, or go on with it",
        DOWNLOADS, footer=True),
    Key("repository", "repository.inspect", "f3", "inspect", "inspect", "Everything that the marked one's header says",
        DOWNLOADS, priority=True),
    Key("repository", "repository.downloads", "ctrl+g", "downloads", "downloads", "All downloads", DOWNLOADS,
        footer=True, priority=True),
    Key("repository", "repository.again", "ctrl+r", "again", "ask again", "Ask the hub again", DOWNLOADS,
        priority=True),
    Key("repository", "repository.close", "escape", "close", "back", "Back; downloads go on", DOWNLOADS, footer=True),
    Key("downloads", "downloads.load", "enter", "load", "load, retry",
        "Load the marked download when it is done; try a failed one again", DOWNLOADS, footer=True, priority=True),
    Key("downloads", "downloads.hold", "space", "hold", "pause or go on", "Pause the marked download, or go on with it",
        DOWNLOADS, footer=True),
    Key("downloads", "downloads.cancel", "delete,d", "cancel", "cancel", "Take the marked download off the list",
        DOWNLOADS, footer=True),
    Key("downloads", "downloads.close", "escape,ctrl+g", "close", "back", "Back; downloads go on", DOWNLOADS,
        footer=True),
    Key("quantize", "quantize.make", "enter", "make", "make it", "Write the model in the marked type", MODELS,
        footer=True, priority=True, palette=False),
    Key("quantize", "quantize.stop", "f8", "stop", "stop", "Stop what is being made", MODELS, footer=True,
        priority=True, palette=False),
    Key("quantize", "quantize.close", "escape", "close", "back", "Back to the models; the work goes on", MODELS,
        footer=True, palette=False),
    Key("hardware", "hardware.apply", "enter", "apply", "use it",
        "Use the marked layout: measured before and after, the chat goes on", HARDWARE, footer=True, priority=True),
    Key("hardware", "hardware.undo", "u", "undo", "go back", "Swap with the layout before", HARDWARE, footer=True),
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
    "underscore": "_", "home": "Home", "end": "End",
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
