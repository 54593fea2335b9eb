"""Presets: a system prompt, sampling options, a model and how to reason, under a name. `presets.toml` in the config
folder has a table for each; what a table leaves out is as in the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from cpuchat.base import paths, toml
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import SettingsError, UsageError
from cpuchat.config.settings import Count, SamplingSection, Settings, explained, with_changes

MAX_NAME = 40
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One preset. None, "" and a seed of -1 are as without it. `model` is what `Library.resolve` takes, or the address
    of a server."""

    name: Name
    system_prompt: str | None = None
    model: str = ""
    reasoning: Literal["auto", "on", "off"] | None = None
    reasoning_budget: Count | None = None
    sampling: SamplingSection = msgspec.field(default_factory=SamplingSection)

    @property
    def options(self) -> dict[str, Any]:
        """Return the sampling options that it sets."""
        values = msgspec.structs.asdict(self.sampling)
        return {name: value for name, value in values.items() if value is not None and (name, value) != ("seed", -1)}

    def applied_to(self, chosen: Settings) -> Settings:
        """Return a copy of `chosen` with what the preset sets."""
        values = {name: getattr(self, name) for name in ("reasoning", "reasoning_budget")}
        chat: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        chat["system_prompt"] = effective_system_prompt(chosen.chat.system_prompt, self)
        return with_changes(chosen, {"sampling": self.options, "chat": chat})


class StoredSampling(SamplingSection, forbid_unknown_fields=False):
    """The sampling options of a `StoredPreset`."""


class StoredPreset(Preset, frozen=True, kw_only=True, forbid_unknown_fields=False, omit_defaults=True):
    """A preset in the chat database or an export, maybe of a later version: what is not known here is left out."""

    sampling: StoredSampling = msgspec.field(default_factory=StoredSampling)


def effective_system_prompt(own: str, preset: Preset | None) -> str:
    """Return the system prompt of a chat: that of its preset if it has one, else its `own`."""
    return (preset.system_prompt if preset is not None else None) or own


def load_presets() -> dict[str, Preset]:
    """Return the presets by name, in the file's order; none without a file. Raises SettingsError: not valid."""
    file = paths.presets_file()
    tables = toml.parse(toml.read(file), str(file))
    found = {}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise SettingsError(f"{file}, {name}: not a table.", f"A preset begins with its name: [{name}].")
        try:
            found[name] = msgspec.convert({**table, "name": name}, prepared(Preset))
        except msgspec.ValidationError as error:
            key, reason = explained(error)
            where = f"{name}.{key}" if key else name
            raise SettingsError(f"{file}, {where}: {reason}.", "Fix or remove that key.") from None
    return found


def find_preset(name: str) -> Preset:
    """Return a preset. Raises UsageError if there is none of that name, SettingsError as `load_presets`."""
    presets = load_presets()
    if name in presets:
        return presets[name]
    known = f"Available: {', '.join(presets)}." if presets else f"Add one to {paths.presets_file()}: docs/chats.md."
    raise UsageError(f"There is no preset {name!r}.", known)
