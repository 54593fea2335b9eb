"""Settings that tuning found to be faster for one model on this machine, kept in `tuned.json` of the cache folder.

They belong to the model's content and the machine with the CPUs that this process may use: with another of these they
are not used. With another build of the engine they are, and marked so.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from cpuchat import paths
from cpuchat.errors import CpuchatError, ModelNotFound
from cpuchat.files import JsonCache
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.models.fingerprint import engine_fingerprint, file_fingerprint
from cpuchat.models.gguf.header import split_parts
from cpuchat.settings import Changes, Settings, with_changes

GROUPS: Final = (
    ("engine.threads", "engine.cores"),
    ("engine.memory",),
    ("engine.flash_attn", "engine.cache_type_k", "engine.cache_type_v"),
    ("engine.ubatch", "engine.batch"),
    ("speculation.drafters", "speculation.depth", "speculation.draft_model"),
)
"""Settings that only make sense together."""
_PLACEMENT: Final = ("engine.threads", "engine.cores", "engine.memory", "speculation.draft_cores")
_DEFAULTS: Final = Settings()
MEASURED: Final = ("engine.threads", "engine.cores")
"""Settings that are measured even if the user set them: nobody knows in advance how many threads are best."""


class TunedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One adopted choice: the settings that it changes, in words, and what it gained (0.05: 5 % faster)."""

    keys: tuple[str, ...]
    words: str
    decode: float
    prefill: float


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """Tuned settings of one model. `changes` as `settings.update` takes them; `replaced`: values by key
    that the user had set when they were measured; `taken` in seconds since 1970, with the build `engine`.
    """

    model: str
    changes: dict[str, dict[str, Any]]
    replaced: dict[str, Any] = {}
    choices: tuple[TunedChoice, ...] = ()
    taken: float = msgspec.field(default_factory=time.time)
    engine: str = msgspec.field(default_factory=engine_fingerprint)

    @property
    def is_outdated(self) -> bool:
        """Return whether it was measured with another build of the engine."""
        return self.engine != engine_fingerprint()

    def applied_to(self, chosen: Settings) -> Settings:
        """Return a copy of `chosen` in which tuned values replace defaults. What the user set wins, with all that
        belongs to it, unless that is `replaced`: it was measured and others were faster."""
        keys = [key for group in GROUPS if self._may_change(chosen, group) for key in group]
        return with_changes(chosen, _only(self.changes, keys))

    def _may_change(self, chosen: Settings, group: Iterable[str]) -> bool:
        return all(value_of(chosen, key) == self.replaced.get(key) for key in set_keys(chosen, group))

    def choice_of(self, key: str) -> TunedChoice | None:
        """Return the choice that changed a setting, or what belongs to it."""
        group = next((group for group in GROUPS if key in group), ())
        return next((one for one in self.choices if {*one.keys} & {*group}), None)


def set_keys(chosen: Settings, group: Iterable[str]) -> list[str]:
    """Return those of a group, and of what it depends on, that the user set to something else than the default."""
    keys = [*group]
    if {*keys} & {*_PLACEMENT}:
        keys = [*dict.fromkeys((*keys, *_PLACEMENT))]
    return [key for key in keys if value_of(chosen, key) != value_of(_DEFAULTS, key)]


def value_of(chosen: Settings, key: str) -> Any:
    """Return the value of a setting such as "engine.threads"."""
    section, _, name = key.partition(".")
    return getattr(getattr(chosen, section), name)


def differences(before: Settings, after: Settings) -> Changes:
    """Return the settings of `GROUPS` that differ, with their values after."""
    changes: Changes = {}
    for key in (key for group in GROUPS for key in group):
        if (value := value_of(after, key)) != value_of(before, key):
            section, _, name = key.partition(".")
            changes.setdefault(section, {})[name] = value
    return changes


class TunedSettings:
    """Reads and writes the file. `put` reads a sample of the model, `find` that of one as large as a tuned model: call
    them in threads."""

    def __init__(self, topology: Topology | None = None) -> None:
        """`topology` replaces this machine's in tests."""
        self._cache = JsonCache(paths.tuned_file(), Tuned, version=1, max_entries=500)
        self._topology = topology

    def find(self, model: Path) -> Tuned | None:
        """Return what was found for this model and machine; None where nothing was, or it is not valid."""
        entries = self._cache.read()
        try:
            size = _size(model) if entries else ""
            found = entries.get(self._key(model)) if any(key.startswith(size) for key in entries) else None
            if found is not None:
                msgspec.convert(found.changes, Settings)
        except (CpuchatError, msgspec.ValidationError):
            return None
        return found

    def put(self, model: Path, tuned: Tuned) -> None:
        """Keep `tuned`; without changes, forget the model. Raises ModelNotFound if its file cannot be read."""
        if tuned.changes:
            self._cache.put(self._key(model), tuned)
        else:
            self.forget(model)

    def forget(self, model: Path) -> bool:
        """Return to the settings as they are; returns whether there was something to forget. Raises ModelNotFound."""
        known = self._key(model) in self._cache.read()
        if known:
            self._cache.remove(self._key(model))
        return known

    def _key(self, model: Path) -> str:
        topology = self._topology = self._topology or read_topology()
        machine = (topology.name, format_cpu_list(topology.allowed), topology.quota)
        parts = (file_fingerprint(model), machine)
        return _size(model) + hashlib.blake2b(msgspec.json.encode(parts), digest_size=12).hexdigest()


def _size(model: Path) -> str:
    """Return what the keys of models of this size begin with. Raises ModelNotFound."""
    try:
        return f"{sum(part.stat().st_size for part in split_parts(model) or [model])} bytes | "
    except OSError as error:
        raise ModelNotFound(f"Cannot read {model}: {error.strerror}.", "Check the path.") from None


def tuned_settings(model: Path, chosen: Settings) -> Settings:
    """Return the settings with which a model is loaded: with what tuning found for it. Reads a sample of its file where
    models are tuned."""
    found = TunedSettings().find(model)
    return found.applied_to(chosen) if found is not None else chosen


def _only(changes: Changes, keys: Iterable[str]) -> Changes:
    wanted = {*keys}
    kept = {
        section: {name: value for name, value in values.items() if f"{section}.{name}" in wanted}
        for section, values in changes.items()
    }
    return {section: values for section, values in kept.items() if values}
