"""Copies texts with the programs of a desktop or tmux: many terminals ignore the escape sequence for it, OSC 52."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

_PATIENCE_SECONDS = 1.0
"""For one program: on a display that does not answer, it would wait for minutes."""
_OBEYING = ("kitty", "foot", "alacritty", "ghostty", "wezterm", "contour", "rio")
"""Terminals that set the clipboard on OSC 52 unless they are told not to, by `TERM` or `TERM_PROGRAM`."""
_PROGRAMS = {
    "clip.exe": ["clip.exe"], "wl-copy": ["wl-copy"], "pbcopy": ["pbcopy"],
    "xclip": ["xclip", "-selection", "clipboard"], "xsel": ["xsel", "--clipboard", "--input"],
    "tmux buffer": ["tmux", "load-buffer", "-w", "-"], "tmux": ["tmux", "load-buffer", "-"],  # without -w before 3.2
}  # fmt: skip


def copy(text: str) -> str:
    """Give `text` to the first program that takes it, and return its name; "" if there is none. Blocks."""
    # What sets the clipboard of the user's screen: over SSH, not that of the remote machine.
    has, display = os.environ.get, os.environ.get("DISPLAY", "")
    is_remote = has("SSH_CONNECTION") or has("SSH_TTY")
    wanted = {
        "clip.exe": has("WSL_DISTRO_NAME") and not is_remote, "wl-copy": has("WAYLAND_DISPLAY") and not is_remote,
        "pbcopy": sys.platform == "darwin" and not is_remote,
        "xclip": display.startswith("localhost:" if is_remote else ""),  # forwarded
        "tmux buffer": has("TMUX"), "tmux": has("TMUX"),
    }  # fmt: skip
    wanted["xclip"] = wanted["xsel"] = display and wanted["xclip"]
    for name in filter(wanted.get, _PROGRAMS):
        data = text.encode("utf-16-le" if name == "clip.exe" else "utf-8", "replace")
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            # Most stay in the background, with what they were given: no pipe to wait for, no signal of this terminal.
            subprocess.run(
                _PROGRAMS[name], input=data, timeout=_PATIENCE_SECONDS, check=True, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            return "tmux buffer" if name == "tmux" else name
    return ""


def told(what: str, by: str) -> str:
    """Return the notice that `what` was copied by a program, or that it is up to the terminal."""
    has = os.environ.get
    terminal = f"{has('TERM')} {has('TERM_PROGRAM')}".lower()
    obeys = has("WT_SESSION") or any(name in terminal for name in _OBEYING)
    if by or (obeys and not has("TMUX") and not has("STY")):
        return f"Copied {what} ({by or 'OSC 52'})."
    hint = "install wl-clipboard or xclip, or select with Shift and the mouse"
    return f"Sent {what} to the terminal (OSC 52). If paste stays empty, {hint}."
