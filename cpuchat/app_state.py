"""What the app remembers by itself, by the names that settings have: `state.json` in the data folder."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from cpuchat import paths
from cpuchat.files import file_lock, read_json, write_atomically

SETTINGS: Final = {"model": ("last",), "ui": ("sidebar", "telemetry")}
"""Settings that are remembered here instead of being written to config.toml, by section."""


class AppState(msgspec.Struct, omit_defaults=True):
    """None: not yet."""

    last: str | None = None
    sidebar: bool | None = None
    telemetry: bool | None = None
    light_terminals: tuple[str, ...] = ()
    """Those that reported a light background last, by name."""


def read_state() -> AppState:
    """Read the state; a missing or damaged file counts as empty."""
    try:
        return read_json(paths.state_file(), msgspec.json.Decoder(AppState).decode)
    except (OSError, ValueError):
        return AppState()


def update_state(values: dict[str, Any]) -> None:
    """Write some values. Raises OSError if the folder cannot be written."""
    file = paths.state_file()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file_lock(file.parent):
        write_atomically(file, msgspec.json.encode(msgspec.structs.replace(read_state(), **values)))
