"""Where the value of each setting comes from: an option, the environment, what the app remembers, or config.toml."""

from __future__ import annotations

from collections.abc import Mapping

from cpuchat import app_state, config_file, paths
from cpuchat.errors import SettingsError
from cpuchat.settings import Changes, environment


class SettingSources:
    """The sources of the settings of one run.

    Args:
        options: options of the command line by the setting that each overrides: `{"engine.threads": "--threads"}`.
    """

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = dict(options or {})
        self._saved: set[str] = set()

    def saved(self, changes: Changes) -> None:
        """Take note of saved settings, which replace options and environment variables for the rest of the run."""
        self._saved |= {f"{section}.{name}" for section, values in changes.items() for name in values}

    def read(self) -> dict[str, str]:
        """Return the source of each setting that has one, in words: `set by --threads`, `set in config.toml`. The
        others have their default. Reads files of a few kilobytes.
        """
        try:
            tables = config_file.parse(config_file.read(paths.settings_file()), "config.toml")
        except SettingsError:  # damaged since it was loaded
            tables = {}
        found = {
            f"{section}.{name}": "set in config.toml"
            for section, values in tables.items()
            if isinstance(values, dict)
            for name in values
        }
        state = app_state.read_state()
        for section, names in app_state.SETTINGS.items():
            found |= {f"{section}.{name}": "as in the last run" for name in names if getattr(state, name) is not None}
        given = environment() | self._options
        return found | {key: f"set by {name}" for key, name in given.items() if key not in self._saved}
