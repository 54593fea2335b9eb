"""The user's own themes and keys, read at the start and again when their files change."""

from __future__ import annotations

import os
from pathlib import Path

from cpuchat import paths
from cpuchat.tui.keymap import load_keymap
from cpuchat.tui.themes import load_themes

Seen = dict[Path, tuple[int, int]]


class OwnFiles:
    """`themes` (the packaged ones too) and `keymap` as they were read last."""

    def __init__(self) -> None:
        self._seen = _seen()
        self.themes = load_themes()
        self.keymap = load_keymap()

    def changed(self) -> bool:
        """Read the files again if one of them was saved, added or removed. Looking takes microseconds; in a thread
        nothing waits for a network folder.
        """
        if (seen := _seen()) == self._seen:
            return False
        self._seen = seen
        self.themes = load_themes()
        self.keymap = load_keymap()
        return True


def _seen() -> Seen:
    """Return the time and size of each file."""
    found: Seen = {}
    try:
        files = [Path(entry.path) for entry in os.scandir(paths.user_themes_dir()) if entry.name.endswith(".toml")]
    except OSError:
        files = []
    for file in (*files, paths.keymap_file()):
        try:
            state = file.stat()
        except OSError:  # missing, or gone meanwhile
            continue
        found[file] = (state.st_mtime_ns, state.st_size)
    return found
