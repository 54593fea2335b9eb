"""Tests what copying uses beside the terminal, with programs that work, fail and hang, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.tui import clipboard
from tests.support.chat_app import loaded
from tests.support.scripted_backend import ScriptedBackend, answer

TEXT = "schön 漢字\n"
X11, WAYLAND, TMUX, SSH = (
    {"DISPLAY": ":0"},
    {"WAYLAND_DISPLAY": "wayland-0"},
    {"TMUX": "/tmp/t,1,0"},
    {"SSH_TTY": "/dev/pts/9"},
)
FORWARDED = {"DISPLAY": "localhost:10.0"}
WORKS = 'cat > "$0.got"; sleep 60 & exit 0'  # stays in the background, with what it inherited
FAILS, HANGS, OLD_TMUX = "cat > /dev/null; exit 1", "exec sleep 60", '[ "$2" = -w ] && exit 1; cat > "$0.got"'


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(clipboard, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("wl-copy", "xclip", "xsel", "tmux", "clip.exe"):
        write(tmp_path / name, "exit 127")
    return tmp_path


def write(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("environment", "scripts", "by"), [
    (X11, {"xclip": WORKS}, "xclip"),
    (X11, {"xsel": WORKS}, "xsel"),
    (X11 | WAYLAND, {"wl-copy": WORKS, "xclip": WORKS}, "wl-copy"),
    (X11 | WAYLAND, {"wl-copy": FAILS, "xclip": WORKS}, "xclip"),
    (X11, {"xclip": HANGS, "xsel": WORKS}, "xsel"),
    (X11 | TMUX, {"xclip": FAILS, "tmux": WORKS}, "tmux buffer"),
    (TMUX, {"tmux": OLD_TMUX}, "tmux buffer"),
    (X11 | TMUX | SSH, {"xclip": WORKS, "tmux": WORKS}, "tmux buffer"),
    (X11 | WAYLAND | SSH, {"xclip": WORKS, "wl-copy": WORKS}, ""),
    (FORWARDED | SSH, {"xclip": WORKS}, "xclip"),
    ({"WSL_DISTRO_NAME": "Debian"}, {"clip.exe": WORKS}, "clip.exe"),
    (X11 | TMUX, {}, ""),
    ({}, {"xclip": WORKS, "wl-copy": WORKS, "tmux": WORKS}, ""),
])  # fmt: skip
def test_the_first_program_that_takes_the_text_is_named(
    programs: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], scripts: dict[str, str], by: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name, script in scripts.items():
        write(programs / name, script)
    assert clipboard.copy(TEXT) == by
    got = [file.read_bytes() for file in programs.glob("*.got")]
    assert got == ([TEXT.encode("utf-16-le" if by == "clip.exe" else "utf-8")] if by else [])


@pytest.mark.parametrize(("environment", "by", "said"), [
    ({}, "xclip", "Copied 9 characters (xclip)."),
    ({"TERM": "xterm-kitty"}, "", "Copied 9 characters (OSC 52)."),
    ({"TERM_PROGRAM": "WezTerm"}, "", "Copied 9 characters (OSC 52)."),
    ({"TERM_PROGRAM": "WezTerm"} | TMUX, "", "Sent 9 characters to the terminal (OSC 52). If paste stays"),
    ({"TERM": "vte-256color"}, "", "Sent 9 characters to the terminal (OSC 52). If paste stays"),
])  # fmt: skip
def test_what_was_copied_by_whom_is_said(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], by: str, said: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert clipboard.told("9 characters", by).startswith(said)


async def test_answers_and_selections_are_copied_by_the_same_programs(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    write(programs / "xclip", WORKS)
    async with loaded(ScriptedBackend([answer("Ein Wort")])) as app:
        await app.send("Hello")
        await app.press("f5")
        await app.until(lambda: "Copied 8 characters (xclip)." in app.notices)
        assert (programs / "xclip.got").read_text() == app.app.clipboard == "Ein Wort"
        await app.write("typed")
        await app.press("shift+left", "shift+left", "ctrl+x")
        await app.until(lambda: "Copied 2 characters (xclip)." in app.notices)
        assert (programs / "xclip.got").read_text() == "ed" and app.prompt.text == "typ"
