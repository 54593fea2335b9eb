"""Tests escape sequences in all that a file, the hub, the database or the settings can name: none gets through."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.chats.store import ChatStore
from tests.cli.program import run
from tests.support.edited_gguf import edited
from tests.support.hub_server import HubServer
from tests.support.terminal import Terminal

# Clipboard, clearing, mouse mode, window title, reversed text, C1 controls, character sets, an answer-back, and markup.
EVIL = "\x1b]52;c;cHduZWQ=\x07\x1b[2J\x1b[?9h\x1b]0;t\x07\u202e\x9b2J\x9d0;t\x9c\x05\x0e[/b][@click=app.quit]\u2066"
FORBIDDEN = tuple(
    part.encode()
    for part in ("\x1b]52;", "\x1b[2J", "\x1b[?9h", "\x1b]0;", "\u202e", "\u2066", *"\x9b\x9d\x05\x0e\x07")
)
REPO = "friends/evil-GGUF"
CATALOG = f"""
[[model]]
id = "shadow"
name = {json.dumps("Shadow" + EVIL)}
family = {json.dumps("Family" + EVIL)}
publisher = {json.dumps("Publisher" + EVIL)}
license = {json.dumps("License" + EVIL)}
note = {json.dumps("Note" + EVIL)}
params = 0.0001
repos = ["{REPO}"]
"""


def assert_harmless(data: bytes) -> None:
    data = re.sub(rb"\x1b\]22;[a-z-]*\x07", b"", data)  # the shape of the mouse pointer, by Textual
    found = [part for part in FORBIDDEN if part in data]
    assert not found, [data[max(0, data.index(part) - 60) : data.index(part) + 20] for part in found]


@pytest.fixture
def hostile(tiny_model: Path, tmp_path: Path, hub_server: HubServer) -> Path:
    """Give everything the most hostile name possible; returns a model that loads."""
    folder = tmp_path / f"models{EVIL.replace('/', '')}"
    folder.mkdir()
    names = ("name", "author", "organization", "license", "description", "size_label", "url", "license.link")
    said = {f"general.{name}": f"{name}{EVIL}" for name in names}
    model = edited(
        tiny_model, folder / f"stem{EVIL.replace('/', '')}.gguf",
        {**said, "general.tags": [f"tag{EVIL}"], "general.languages": [EVIL], "tokenizer.ggml.pre": "gpt-2",
         "tokenizer.chat_template": "{# " + EVIL + " #}{% for m in messages %}{{ m.content }}{% endfor %}"},
    )  # fmt: skip
    edited(tiny_model, folder / "strange.gguf", {"general.name": f"Odd{EVIL}", "general.architecture": f"arch{EVIL}"})
    (folder / f"broken{EVIL.replace('/', '')}.gguf").write_bytes(b"GGUF" + EVIL.encode())

    hub_server.add(
        REPO, {f"small{EVIL.replace('/', '')}-Q4_K_M.gguf": model, "shadow-Q8_0.gguf": tiny_model},
        tags=[f"license:{EVIL}", EVIL], cardData={"license": f"mit{EVIL}", "base_model": f"base/{EVIL}"}, author=EVIL,
        downloads=5,
    )  # fmt: skip
    hub_server.add("friends/other", {"x.gguf": tiny_model}, id=f"friends/ev{EVIL}", author=f"who{EVIL}")

    themes = paths.user_themes_dir()
    themes.mkdir(parents=True)
    (themes / f"bad{EVIL.replace('/', '')}.toml").write_text(f"name = {json.dumps('x' + EVIL)}\n")
    paths.user_catalog().write_text(CATALOG)
    paths.settings_file().write_text(
        f"[model]\nfolders = [{json.dumps(str(folder))}]\n[chat]\nsystem_prompt = {json.dumps(EVIL)}\n"
        f"[ui]\ntheme = {json.dumps('theme' + EVIL)}\nshow_reasoning = true\n"
        f"[hardware]\nprobe = false\n[speculation]\ndraft_model = {json.dumps('draft' + EVIL)}\n"
    )
    store = ChatStore(paths.chats_db())
    chat = store.create_chat(f"chatmodel{EVIL}", title=f"Title {EVIL}")
    store.add_message(chat.id, "user", f"Question {EVIL}")
    store.add_message(
        chat.id, "assistant", f"Answer {EVIL} `{EVIL}` [link{EVIL}](http://{EVIL})\n\n```py{EVIL}\n{EVIL}\n```",
        reasoning=f"Reasoning {EVIL}", model=f"Writer {EVIL}", stop_reason=f"stop{EVIL}",
    )  # fmt: skip
    store.close()
    return model


def visit(terminal: Terminal, key: str, shown: str) -> None:
    """Open a screen, see `shown` on it, and leave it."""
    terminal.press(key)
    terminal.wait_for(shown)
    # Esc as of kitty's protocol: `shown` may also be away while it is painted, and typed after a plain Esc, a key
    # would be Alt+key.
    terminal.type("\x1b[27u")
    terminal.wait_until(lambda screen: shown not in screen, f"the end of {shown!r}")


def test_no_screen_of_the_app_lets_an_escape_sequence_through(hostile: Path, tmp_path: Path) -> None:
    with contextlib.closing(Terminal(["--model", str(hostile)], columns=160, rows=45, home=tmp_path)) as terminal:
        terminal.wait_for("Themes skipped")  # passes by; the model is loaded meanwhile
        terminal.wait_for("0/4k ctx")
        terminal.wait_for("name␛]52;c;cHduZWQ=")  # the status line
        terminal.press("ctrl+p")
        terminal.wait_for("Search for commands")
        terminal.press("esc")
        terminal.wait_until(lambda screen: "Search for commands" not in screen, "the chat")
        terminal.press("f8", "f8")  # hides the chats, and shows them with the focus
        terminal.type("\x1b[H\r")
        terminal.wait_for("Writer ␛]52")
        terminal.wait_for("Reasoning ␛]52")
        terminal.type("\x1b[200~pasted\u202e\u2066\x9b2J\x9d0;t\x9c\x1b[201~")
        terminal.wait_for("pasted")
        terminal.press("enter")
        terminal.wait_for("name␛]52;c;cHduZWQ=␇␛[2J␛[?9h␛]0;t␇‹U+202E›‹U+009B›2J‹U+009D›0;t‹U+009C›␅␎[/b]")
        terminal.press("esc")
        terminal.wait_for("stopped")
        visit(terminal, "f2", "config.toml")
        visit(terminal, "f12", "read bandwidth")
        visit(terminal, "f1", "─ Help ─")
        terminal.press("ctrl+o")
        terminal.wait_for("Odd␛]52")
        for model in ("name", "Odd"):
            terminal.type(model)
            terminal.wait_for(f"“{model}”")
            if model == "name":
                visit(terminal, "f5", "writes ")  # quantizing it
            else:
                visit(terminal, "f8", "Delete ")  # the one in use cannot be
            terminal.press("ctrl+u")
        terminal.wait_for("broken␛]52")
        visit(terminal, "f9", "Draft models for name␛]52")
        terminal.type("friends")
        terminal.press("ctrl+s")
        terminal.wait_for("friends/evil-GGUF")
        terminal.press("ctrl+u")
        terminal.type("shadow")
        terminal.wait_for("Shadow␛]52")
        terminal.press("enter")
        terminal.wait_until(lambda screen: "Shadow␛" not in screen and "Q8_0" in screen, "the repository")
        terminal.press("ctrl+q")
        assert terminal.wait_for_end() == 0
    assert_harmless(bytes(terminal.raw))


COMMANDS = (
    ("models", "list"), ("models", "show", "MODEL"), ("models", "show", "MODEL", "--template"),
    ("models", "show", "MODEL", "--metadata", "--json"), ("models", "search", "friends"),
    ("models", "catalog"), ("models", "show", "x" + EVIL), ("ask", "--model", "x" + EVIL, "hi"), ("models", EVIL),
)  # fmt: skip


def test_no_command_lets_an_escape_sequence_into_a_pipe(hostile: Path) -> None:
    for arguments in COMMANDS:
        done = run(*(str(hostile) if argument == "MODEL" else argument for argument in arguments))
        assert done.stdout + done.stderr, arguments
        assert_harmless((done.stdout + done.stderr).encode())
