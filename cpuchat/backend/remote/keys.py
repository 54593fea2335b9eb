"""API keys of servers: from the environment, or from a file that only its owner may read.

A key goes to the server that it is for and nowhere else: not into settings, logs, messages or command lines.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from cpuchat import paths, toml
from cpuchat.errors import ServerError
from cpuchat.files import file_lock, write_atomically

VARIABLE = "CPUCHAT_API_KEY"
_KNOWN = {"https://api.openai.com": "OPENAI_API_KEY"}
"""Variables of services that everyone names alike; sent to these alone."""


class KeyRing:
    """Finds the key of a server: in the file, else in the environment.

    Args:
        chosen: the server that `CPUCHAT_API_KEY` is for: the one of `--server`, or the only one of the settings.
        file: replaces the one in the data folder.
    """

    def __init__(self, chosen: str = "", file: Path | None = None) -> None:
        self._chosen = chosen
        self._file = file or paths.keys_file()
        self._former = None if file else paths.config_dir() / self._file.name  # where it was in earlier versions

    def key(self, server: str) -> str:
        """Return the key, "" when there is none.

        Raises:
            ServerError: the file cannot be read or others may read it, or the key has characters that no key has.
        """
        key = self._known().get(server, "")
        if not key and server == self._chosen:
            key = os.environ.get(VARIABLE, "").strip()
        if not key and server in _KNOWN:
            key = os.environ.get(_KNOWN[server], "").strip()
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ServerError("The API key contains invalid characters.", f"Check {VARIABLE}, or set the key again.")
        return key

    def store(self, server: str, key: str) -> None:
        """Write the key of a server; "" removes it.

        Raises:
            ServerError: as `key`.
            OSError: the file cannot be written.
        """
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(self._file.parent):
            known = self._known()
            known.pop(server, None)
            if key:
                known[server] = key
            self._write(known)

    def _known(self) -> dict[str, str]:
        """Return the keys by server; moves the file of an earlier version. Raises ServerError."""
        if self._former is None or self._file.exists() or not self._former.exists():
            return _read(self._file)
        known = _read(self._former)
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(known)
            self._former.unlink()
        return known

    def _write(self, known: dict[str, str]) -> None:
        import tomlkit

        write_atomically(self._file, tomlkit.dumps(known), mode=0o600)


def _read(file: Path) -> dict[str, str]:
    try:
        mode = file.stat().st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise ServerError(
                f"Other users may read {paths.shown(file)}, which holds API keys.",
                f"Run chmod 600 {paths.shown(file)}.",
            )
        tables = toml.loads(paths.read_text(file))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ServerError(f"Cannot read {paths.shown(file)}: {error.strerror}.", "Fix or remove it.") from None
    except ValueError:  # without the text that is wrong: it may be a key
        raise ServerError(f"{paths.shown(file)} is not valid TOML.", 'Its lines are "https://HOST" = "KEY".') from None
    return {name: value for name, value in tables.items() if isinstance(value, str)}
