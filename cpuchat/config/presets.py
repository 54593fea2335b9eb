"""Presets: a system prompt, sampling options, a model and how to reason, under a name. `presets.toml` in the config
folder has a table for each; what a table leaves out is as in the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from cpuchat.base import paths, toml
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import SettingsError, UsageError
from cpuchat.config.settings import Changes, Count, SamplingSection, explained


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One preset. None, "" and a seed of -1 are as without it. `model`: as of `Library.resolve`, or an address."""

    system_prompt: str = ""
    model: str = ""
    reasoning: Literal["auto", "on", "off"] | None = None
    reasoning_budget: Count | None = None
    sampling: SamplingSection = msgspec.field(default_factory=SamplingSection)

    @property
    def changes(self) -> Changes:
        """Return what the preset sets."""
        names = "system_prompt", "reasoning", "reasoning_budget"
        chat: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) not in (None, "")}
        options = msgspec.structs.asdict(self.sampling).items()
        sampling = {name: value for name, value in options if value is not None and (name, value) != ("seed", -1)}
        return {"chat": chat, "sampling": sampling}


def find_preset(name: str) -> Preset:
    """Return a preset of the file. Raises UsageError: it has none of that name; SettingsError: not valid."""
    file = paths.presets_file()
    tables = toml.parse(toml.read(file), str(file))
    if name not in tables:
        known = f"Available: {', '.join(tables)}." if tables else f"Add one to {file}: `cpuchat docs chats`."
        raise UsageError(f"There is no preset {name!r}.", known)
    if not isinstance(tables[name], Mapping):
        raise SettingsError(f"{file}, {name}: not a table.", f"A preset begins with its name: [{name}].")
    try:
        return msgspec.convert(tables[name], prepared(Preset))
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        where = f"{name}.{key}" if key else name
        raise SettingsError(f"{file}, {where}: {reason}.", "Fix or remove that key.") from None
