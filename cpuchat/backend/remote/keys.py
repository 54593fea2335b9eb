"""API keys of servers: from the system's keyring, a file that only its owner may read, or the environment.

A key goes to the server that it is for and nowhere else: not into settings, logs, messages or command lines.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.base import paths, toml
from cpuchat.base.errors import ServerError
from cpuchat.base.files import file_lock, write_atomically

if TYPE_CHECKING:
    from keyring.backend import KeyringBackend

VARIABLE = "CPUCHAT_API_KEY"
_KNOWN = {"https://api.openai.com": "OPENAI_API_KEY"}
"""Variables of services that everyone names alike; sent to these alone."""
_SERVICE = "cpuchat"  # under which the system's keyring has the keys, by server
_IN_KEYRING = {"keyring": _SERVICE}
"""Stands in the file for a key that the keyring has: one that is locked asks its owner, so only these are looked up."""


class KeyRing:
    """Finds the key of a server: where it was stored, else in the environment. `chosen`: the server that
    `CPUCHAT_API_KEY` is for: the one of `--server`, or the only one of the settings.
    """

    def __init__(self, chosen: str = "") -> None:
        self._chosen = chosen
        self._file = paths.keys_file()

    def key(self, server: str) -> str:
        """Return the key, "" when there is none. May wait for the owner to unlock a keyring. Raises ServerError: the
        file cannot be read or others may read it, the keyring does not give the key, or the key has characters that no
        key has.
        """
        key = _read(self._file).get(server, "")
        if not isinstance(key, str):
            with _system_keyring(server) as keyring:
                if keyring is None:
                    hint = f"Start cpuchat where it was stored, or store the key again: cpuchat servers key {server}."
                    raise ServerError(f"The API key of {server} is in a keyring, and none is found here.", hint)
                key = keyring.get_password(_SERVICE, server) or ""
        if not key and server == self._chosen:
            key = os.environ.get(VARIABLE, "").strip()
        if not key and server in _KNOWN:
            key = os.environ.get(_KNOWN[server], "").strip()
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ServerError("The API key contains invalid characters.", f"Check {VARIABLE}, or set the key again.")
        return key

    def store(self, server: str, key: str) -> str:
        """Keep the key of a server, in the system's keyring if there is one, else in the file; "" removes it. Returns
        the place, as shown to the user. Raises ServerError: as `key`; OSError: the file cannot be written.
        """
        import tomlkit

        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(self._file.parent), _system_keyring(server) as keyring:
            known, place = _read(self._file), paths.shown(self._file)
            former = known.pop(server, "")
            if key and keyring is not None:
                keyring.set_password(_SERVICE, server, key)
                known[server], place = _IN_KEYRING, f"the keyring ({keyring.name})"
            elif key:
                known[server] = key
            elif former == _IN_KEYRING and keyring is not None:
                keyring.delete_password(_SERVICE, server)
            write_atomically(self._file, tomlkit.dumps(known), mode=0o600)
        return place


@contextlib.contextmanager
def _system_keyring(server: str) -> Iterator[KeyringBackend | None]:
    """Give the keyring of the desktop or system; None without one, or without the extra `keyring`. Raises ServerError:
    it refuses the key of `server`.
    """
    try:
        import keyring
        from keyring.errors import KeyringError
    except ImportError:
        yield None
        return
    found = keyring.get_keyring()
    try:
        yield found if found.priority > 0 else None
    except KeyringError as error:
        hint = f"Unlock it, or store the key again: cpuchat servers key {server}."
        raise ServerError(f"The keyring refused the API key of {server}: {type(error).__name__}.", hint) from None


def _read(file: Path) -> dict[str, object]:
    try:
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
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
    return {name: value for name, value in tables.items() if isinstance(value, str) or value == _IN_KEYRING}
