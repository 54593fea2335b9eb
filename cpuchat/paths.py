"""Where things are kept. Nothing is created here; who writes creates.

`CPUCHAT_CONFIG_DIR`, `CPUCHAT_DATA_DIR` and `CPUCHAT_CACHE_DIR` override the platform's folders.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from pathlib import Path

import platformdirs

APP = "cpuchat"


def _folder(variable: str, default: Path) -> Path:
    value = os.environ.get(variable)
    return expanded(value) if value else default


def expanded(text: str | Path) -> Path:
    """`text` as a path, a leading `~` or `~user` replaced by that home folder; of an unknown user it stays, as in
    shells."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 (Path.expanduser raises RuntimeError there)


def read_text(file: Path, most: int = 1 << 20) -> str:
    """The UTF-8 text of a small file that people edit; a byte order mark is left out.

    Raises:
        OSError: it cannot be read, is no regular file (a pipe would never end), or holds over `most` bytes.
        UnicodeDecodeError: it is not UTF-8.
    """
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        with os.fdopen(handle, "rb", closefd=False) as stream:
            data = stream.read(most + 1)
    finally:
        os.close(handle)
    if len(data) > most:
        limit = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
        raise OSError(errno.EFBIG, f"larger than {limit}", str(file))
    return data.decode("utf-8-sig")


def config_dir() -> Path:
    """Settings and the user's themes."""
    return _folder("CPUCHAT_CONFIG_DIR", platformdirs.user_config_path(APP, appauthor=False))


def data_dir() -> Path:
    """Chats; mode 0700."""
    return _folder("CPUCHAT_DATA_DIR", platformdirs.user_data_path(APP, appauthor=False))


def cache_dir() -> Path:
    """What can be made again: saved KV, calibrations, logs."""
    return _folder("CPUCHAT_CACHE_DIR", platformdirs.user_cache_path(APP, appauthor=False))


def shown(path: Path) -> str:
    """A path as people write it, with `~` for the home folder."""
    with contextlib.suppress(ValueError, RuntimeError):
        return str(Path("~") / path.relative_to(Path.home()))
    return str(path)


def settings_file() -> Path:
    return config_dir() / "config.toml"


def state_file() -> Path:
    """What the app remembers by itself: the last model, which panes are shown."""
    return data_dir() / "state.json"


def user_themes_dir() -> Path:
    return config_dir() / "themes"


def user_catalog() -> Path:
    """The user's own entries of the catalog of models."""
    return config_dir() / "catalog.toml"


def chats_db() -> Path:
    return data_dir() / "chats.db"


def made_models_dir() -> Path:
    """Models that were quantized here from one that lies in no folder of the user's."""
    return data_dir() / "models"


def downloads_file() -> Path:
    """Downloads that are not done, so that the next run can go on with them."""
    return data_dir() / "downloads.json"


def recent_models_file() -> Path:
    """Models that were opened by their path and lie in no folder that is searched."""
    return data_dir() / "recent_models.json"


def kv_dir() -> Path:
    """Saved KV of chats, so that they go on quickly after a restart."""
    return cache_dir() / "kv"


def calibration_file() -> Path:
    """What passes of each model cost on this machine, as measured."""
    return cache_dir() / "calibrations.json"


def kv_stem(chat_id: str) -> str:
    """How the names of a chat's files in `kv_dir` begin, whatever model they belong to."""
    return hashlib.sha256(chat_id.encode()).hexdigest()[:20]


def pairs_file() -> Path:
    """Which draft models fit which targets, as far as it has been looked at."""
    return cache_dir() / "pairs.json"


def library_file() -> Path:
    """What the headers of the models of this machine say, so that they are read once."""
    return cache_dir() / "library.json"


def usage_file() -> Path:
    """When each model was loaded last, and how fast it answered."""
    return cache_dir() / "usage.json"


def bandwidth_file() -> Path:
    """What the memory of this machine was measured to deliver."""
    return cache_dir() / "bandwidth.json"


def headers_dir() -> Path:
    """Headers of models on the hub."""
    return cache_dir() / "headers"


def log_dir() -> Path:
    """One log per worker; the newest few are kept."""
    return cache_dir() / "logs"


def packaged_themes_dir() -> Path:
    """Themes that come with the program: beside it in a checkout, inside it when installed."""
    inside = Path(__file__).parent / "themes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "themes"


def demo_dir() -> Path:
    """The demo models of the package."""
    return Path(__file__).parent / "models" / "demo"
