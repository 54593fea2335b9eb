"""The paths of all files. Nothing is created here; writers create their folders.

`CPUCHAT_CONFIG_DIR`, `CPUCHAT_DATA_DIR` and `CPUCHAT_CACHE_DIR` override the platform's folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import platformdirs

from cpuchat.files import read_small

APP = "cpuchat"


def _folder(variable: str, default: Path) -> Path:
    value = os.environ.get(variable)
    return expanded(value) if value else default


def expanded(text: str | Path) -> Path:
    """Return `text` as a path with a leading `~` or `~user` expanded; unchanged for an unknown user, as in shells."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 (Path.expanduser raises RuntimeError there)


def read_text(file: Path, most: int = 1 << 20) -> str:
    """Read the UTF-8 text of a small file that people edit, without a byte order mark.

    Raises:
        OSError: it cannot be read, is not a regular file (a pipe might never end), or is larger than `most` bytes.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_small(file, most).decode("utf-8-sig")


def config_dir() -> Path:
    """Return the folder of settings and the user's themes."""
    return _folder("CPUCHAT_CONFIG_DIR", platformdirs.user_config_path(APP, appauthor=False))


def data_dir() -> Path:
    """Return the folder of chats; mode 0700."""
    return _folder("CPUCHAT_DATA_DIR", platformdirs.user_data_path(APP, appauthor=False))


def cache_dir() -> Path:
    """Return the folder of what can be recreated: saved KV, calibrations, logs."""
    return _folder("CPUCHAT_CACHE_DIR", platformdirs.user_cache_path(APP, appauthor=False))


def shown(path: Path) -> str:
    """Return a path for display, with `~` for the home folder."""
    with contextlib.suppress(ValueError, RuntimeError):
        return str(Path("~") / path.relative_to(Path.home()))
    return str(path)


def settings_file() -> Path:
    return config_dir() / "config.toml"


def state_file() -> Path:
    """Return the file with the app's state: the last model, visible panes."""
    return data_dir() / "state.json"


def user_themes_dir() -> Path:
    return config_dir() / "themes"


def keymap_file() -> Path:
    """Return the file of keys that the user moved."""
    return config_dir() / "keymap.toml"


def presets_file() -> Path:
    """Return the file of presets."""
    return config_dir() / "presets.toml"


def tool_servers_file() -> Path:
    """Return the file of MCP servers, whose form other programs use as well."""
    return config_dir() / "mcp.json"


def approvals_file() -> Path:
    """Return the file of tools that run without asking."""
    return data_dir() / "approvals.json"


def user_catalog() -> Path:
    """Return the file of the user's catalog entries."""
    return config_dir() / "catalog.toml"


def keys_file() -> Path:
    """Return the file of API keys by server; mode 0600. Not in the config folder, which many keep in a repository."""
    return data_dir() / "keys.toml"


def user_machines_dir() -> Path:
    """Return the folder of machines that the user plans for, a TOML file each."""
    return config_dir() / "machines"


def chats_db() -> Path:
    return data_dir() / "chats.db"


def made_models_dir() -> Path:
    """Return the folder of quantized models whose source is not in a folder of the user."""
    return data_dir() / "models"


def speech_dir() -> Path:
    """Return the folder of answers that were read aloud where there is no sound device, as WAV files."""
    return data_dir() / "speech"


def downloads_file() -> Path:
    """Return the file of unfinished downloads, which the next run resumes."""
    return data_dir() / "downloads.json"


def recent_models_file() -> Path:
    """Return the file of models that were opened by path outside the searched folders."""
    return data_dir() / "recent_models.json"


def chosen_drafts_file() -> Path:
    """Return the file of the draft models that the user chose, by model."""
    return data_dir() / "draft_models.json"


def servers_dir() -> Path:
    """Return the folder of the records of running servers."""
    return data_dir() / "servers"


def kv_dir() -> Path:
    """Return the folder of saved KV caches of chats, to continue them quickly after a restart."""
    return cache_dir() / "kv"


def calibration_file() -> Path:
    """Return the file of calibrated pass costs."""
    return cache_dir() / "calibrations.json"


def kv_stem(chat_id: str) -> str:
    """Return the common prefix of a chat's file names in `kv_dir`, for all models."""
    return hashlib.sha256(chat_id.encode()).hexdigest()[:20]


def quality_dir() -> Path:
    """Measured windows of quality measurements, to resume them."""
    return cache_dir() / "quality"


def bench_dir() -> Path:
    """Journals of benchmarks, to resume them."""
    return cache_dir() / "bench"


def build_speeds_file() -> Path:
    """Measured decode rates by build of the engine."""
    return cache_dir() / "build_speeds.json"


def tuned_file() -> Path:
    """Return the file of settings that tuning found, by model."""
    return cache_dir() / "tuned.json"


def pairs_file() -> Path:
    """Return the file of results of comparing draft models with targets."""
    return cache_dir() / "pairs.json"


def library_file() -> Path:
    """Return the file of summaries of model headers."""
    return cache_dir() / "library.json"


def usage_file() -> Path:
    """Return the file of when each model was loaded last, and its measured speed."""
    return cache_dir() / "usage.json"


def bandwidth_file() -> Path:
    """Return the file of measured memory bandwidths."""
    return cache_dir() / "bandwidth.json"


def costs_file() -> Path:
    """Return the file of measured passes, and of the profiles of this machine that were fitted to them."""
    return cache_dir() / "costs.json"


def headers_dir() -> Path:
    """Return the folder of cached headers of remote models."""
    return cache_dir() / "headers"


def log_dir() -> Path:
    """Return the folder of worker logs, one each; the newest few are kept."""
    return cache_dir() / "logs"


def packaged_themes_dir() -> Path:
    """Return the folder of bundled themes: beside the package in a checkout, inside it when installed."""
    inside = Path(__file__).parent / "themes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "themes"


def demo_dir() -> Path:
    """Return the folder of the demo models."""
    return Path(__file__).parent / "models" / "demo"


def recording_file() -> Path:
    """Return the file of the recorded answer that the tour plays."""
    return demo_dir() / "recording.json"
