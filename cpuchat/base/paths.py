"""The paths of all files. Nothing is created here; writers create their folders.

`CPUCHAT_CONFIG_DIR`, `CPUCHAT_DATA_DIR` and `CPUCHAT_CACHE_DIR` override the platform's folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlparse

import platformdirs

from cpuchat.base.files import read_small

APP = "cpuchat"

_PACKAGE = Path(__file__).parent.parent


def _folder(variable: str, default: Path) -> Path:
    value = os.environ.get(variable)
    return expanded(value) if value else default


def expanded(text: str | Path) -> Path:
    """Return a path, also of a `file://`, with `~` or `~user` expanded, but for an unknown user, as in shells."""
    if isinstance(text, str) and text.startswith("file://"):
        text = unquote(urlparse(text).path)
    return Path(os.path.expanduser(text))  # noqa: PTH111 (Path.expanduser raises RuntimeError there)


def read_text(file: Path, max_size: int = 1 << 20) -> str:
    """Read the UTF-8 text of a small file that people edit, without a byte order mark. Raises OSError: it cannot be
    read, is not a regular file (a pipe might never end), or is larger than `max_size` bytes; UnicodeDecodeError: it is
    not UTF-8."""
    return read_small(file, max_size).decode("utf-8-sig")


def config_dir() -> Path:
    """Return the folder of settings and the user's themes."""
    return _folder("CPUCHAT_CONFIG_DIR", platformdirs.user_config_path(APP, appauthor=False))


def data_dir() -> Path:
    """Return the folder of chats; mode 0700."""
    return _folder("CPUCHAT_DATA_DIR", platformdirs.user_data_path(APP, appauthor=False))


def cache_dir() -> Path:
    """Return the folder of what can be recreated: saved KV, calibrations, logs."""
    return _folder("CPUCHAT_CACHE_DIR", platformdirs.user_cache_path(APP, appauthor=False))


def engine_libraries() -> Path | None:
    """Return the folder of the engine's libraries; None without an engine."""
    found = importlib.util.find_spec("llama_cpp")
    return None if found is None or found.origin is None else Path(found.origin).parent / "lib"


def engine_library(name: str) -> Path | None:
    """Return a library of the engine's build that not every engine has, such as "cpuchat-read"; None without it."""
    folder = engine_libraries()
    file = folder / f"lib{name}.{'dylib' if sys.platform == 'darwin' else 'so'}" if folder is not None else None
    return file if file is not None and file.exists() else None


def shown(path: Path) -> str:
    """Return a path for display, with `~` for the home folder."""
    with contextlib.suppress(ValueError, RuntimeError):
        return str(Path("~") / path.relative_to(Path.home()))
    return str(path)


def _inside(folder: Callable[[], Path], name: str) -> Callable[[], Path]:
    """Return a function that returns the path of `name` in a folder, which depends on the environment at the call."""
    return lambda: folder() / name


settings_file = _inside(config_dir, "config.toml")
user_themes_dir = _inside(config_dir, "themes")
keymap_file = _inside(config_dir, "keymap.toml")
"""Keys that the user moved."""
presets_file = _inside(config_dir, "presets.toml")
tool_servers_file = _inside(config_dir, "mcp.json")
"""MCP servers, whose form other programs use as well."""
user_catalog = _inside(config_dir, "catalog.toml")
"""The user's catalog entries."""
user_machines_dir = _inside(config_dir, "machines")
"""Machines that the user plans for, a TOML file each."""

state_file = _inside(data_dir, "state.json")
"""The app's state: the last model, visible panes."""
keys_file = _inside(data_dir, "keys.toml")
"""API keys by server; mode 0600. Not in the config folder, which many keep in a repository."""
chats_db = _inside(data_dir, "chats.db")
made_models_dir = _inside(data_dir, "models")
"""Quantized models whose source is not in a folder of the user."""
downloads_file = _inside(data_dir, "downloads.json")
"""Unfinished downloads, which the next run resumes."""
recent_models_file = _inside(data_dir, "recent_models.json")
"""Models that were opened by path outside the searched folders."""
chosen_drafts_file = _inside(data_dir, "draft_models.json")
"""The draft models that the user chose, by model."""
servers_dir = _inside(data_dir, "servers")
"""The records of running servers."""

kv_dir = _inside(cache_dir, "kv")
"""Saved KV caches of chats, to continue them quickly after a restart."""
measured_file = _inside(cache_dir, "measured.db")
"""Everything that was measured on this machine."""
library_file = _inside(cache_dir, "library.json")
"""Summaries of model headers."""
log_dir = _inside(cache_dir, "logs")
"""Worker logs, one each; the newest few are kept."""


def kv_stem(chat_id: str) -> str:
    """Return the common prefix of a chat's file names in `kv_dir`, for all models."""
    return hashlib.sha256(chat_id.encode()).hexdigest()[:20]


def packaged(name: str) -> Path:
    """Return a bundled folder, "themes" or "docs": beside the package in a checkout, inside it when installed."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def demo_dir() -> Path:
    """Return the folder of the demo models."""
    return _PACKAGE / "models" / "demo"


def recording_file(name: str) -> Path:
    """Return the file of one of the recorded comparisons that the app replays ("drafts", "quantizations")."""
    return demo_dir() / f"recording-{name}.json"
