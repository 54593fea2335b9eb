"""API keys of servers: from a file that only its owner may read, or the environment.

A key goes to the server that it is for and nowhere else: not into settings, logs, messages or command lines.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from cpuchat.base import paths, toml
from cpuchat.base.errors import ServerError
from cpuchat.base.files import file_lock, write_atomically

VARIABLE = "CPUCHAT_API_KEY"
_KNOWN = {"https://api.openai.com": "OPENAI_API_KEY"}
"""Variables of services that everyone names alike; sent to these alone."""


class KeyRing:
    """Finds the key of a server: where it was stored, else in the environment. `chosen`: the server that
    `CPUCHAT_API_KEY` is for: the one of `--server`, or the only one of the settings.
    """

    def __init__(self, chosen: str = "") -> None:
        self._chosen = chosen
        self._file = paths.keys_file()

    def key(self, server: str) -> str:
        """Return the key, "" when there is none. Raises ServerError: the file cannot be read or others may read it, or
        the key is no text or has characters that no key has.
        """
        stored = _read(self._file).get(server, "")
        key = stored if isinstance(stored, str) else ""
        if not key and server == self._chosen:
            key = os.environ.get(VARIABLE, "").strip()
        if not key and server in _KNOWN:
            key = os.environ.get(_KNOWN[server], "").strip()
        if not key and stored:  # a table such as {keyring = true}
            raise ServerError(
                f"{paths.shown(self._file)} has no text as the key of {server}; keyrings are not read.",
                f"Store the key with `cpuchat servers key {server}`.",
            )
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ServerError("The API key contains invalid characters.", f"Check {VARIABLE}, or set the key again.")
        return key

    def store(self, server: str, key: str) -> str:
        """Keep the key of a server in the file; "" removes it. Returns the place, as shown to the user. Raises
        ServerError: as `key`; OSError: the file cannot be written.
        """
        import tomlkit

        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(self._file.parent):
            known = {name: value for name, value in _read(self._file).items() if name != server}
            write_atomically(self._file, tomlkit.dumps(known | ({server: key} if key else {})), mode=0o600)
        return paths.shown(self._file)


def _read(file: Path) -> dict[str, Any]:
    try:
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise ServerError(
                f"Other users may read {paths.shown(file)}, which holds API keys.",
                f"Run chmod 600 {paths.shown(file)}.",
            )
        return toml.loads(paths.read_text(file))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ServerError(f"Cannot read {paths.shown(file)}: {error.strerror}.", "Fix or remove it.") from None
    except ValueError:  # without the text that is wrong: it may be a key
        raise ServerError(f"{paths.shown(file)} is not valid TOML.", 'Its lines are "https://HOST" = "KEY".') from None
