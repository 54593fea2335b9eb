"""One side of a comparison: a model file, and the settings in which it differs from the user's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.errors import CpuchatError, UsageError
from cpuchat.models.gguf.header import read_model
from cpuchat.settings import Settings, explained

KEYS: dict[str, tuple[str, ...]] = {
    "drafters": ("speculation.drafters",),
    "draft-model": ("speculation.draft_model",),
    "draft-depth": ("speculation.depth",),
    "threads": ("engine.threads",),
    "cores": ("engine.cores",),
    "memory": ("engine.memory",),
    "kv": ("engine.cache_type_k", "engine.cache_type_v"),
    "flash-attn": ("engine.flash_attn",),
    "temperature": ("sampling.temperature",),
}
"""Options of a side, and the settings that they stand for."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A model file with `changes` by the names of `KEYS`. `model` and `quantization` are from its header, "" when that
    cannot be read."""

    path: str
    changes: dict[str, str] = {}
    model: str = ""
    quantization: str = ""

    @classmethod
    def of(cls, path: Path, changes: dict[str, str] | None = None) -> Side:
        """Read the header for the names; one that cannot be read fails when it is loaded."""
        try:
            header = read_model(path)
        except (CpuchatError, OSError):
            return cls(path=str(path), changes=changes or {})
        return cls(path=str(path), changes=changes or {}, model=header.name, quantization=header.quantization)

    def settings(self, base: Settings) -> Settings:
        """Return `base` with the changes of this side.

        Greedy and without drafters unless this side says otherwise: two samples differ anyway, and a speed with
        drafts tells more about the text than about the file.

        Raises:
            UsageError: a value is not acceptable.
        """
        tables: dict[str, Any] = msgspec.to_builtins(base)
        tables["sampling"]["temperature"] = 0.0
        tables["speculation"]["drafters"] = "auto" if "draft-model" in self.changes else "off"
        for key, value in self.changes.items():
            for name in KEYS[key]:
                section, _, field = name.partition(".")
                tables[section][field] = value
        try:
            return msgspec.convert(tables, Settings, strict=False)
        except msgspec.ValidationError as error:
            _, reason = explained(error)
            raise UsageError(f"{self.label}: {reason}.", f"Available settings: {', '.join(KEYS)}.") from None

    @property
    def name(self) -> str:
        """The model with its quantization: `Qwen2.5-1.5B-Instruct Q8_0`."""
        model = self.model or Path(self.path).stem
        parts = [model, *([] if self.quantization.lower() in model.lower() else [self.quantization])]
        return " ".join(parts)

    @property
    def label(self) -> str:
        """The name with the changes: `Qwen2.5-1.5B-Instruct Q8_0 · threads 2`."""
        return " · ".join([self.name, *(f"{key} {value}" for key, value in self.changes.items())])


def short_names(a: Side, b: Side) -> tuple[str, str]:
    """Name the sides by what differs only: `Q8_0` and `Q4_K_M`; `Q8_0 · threads 1` and `Q8_0 · threads 2`."""
    same_model = a.model == b.model and bool(a.quantization and b.quantization)
    if a.path != b.path and (a.name == b.name or (same_model and a.quantization == b.quantization)):
        heads = Path(a.path).stem, Path(b.path).stem
    elif same_model:
        heads = a.quantization, b.quantization
    else:
        heads = a.name, b.name
    first, second = (
        " · ".join(
            [head, *(f"{key} {value}" for key, value in side.changes.items() if other.changes.get(key) != value)]
        )
        for head, side, other in zip(heads, (a, b), (b, a), strict=True)
    )
    return first, second


def parse_side(text: str, resolve: Callable[[str], Path]) -> Side:
    """Read a side as the command line takes it: `demo-q4,drafters=off,cores=0,2`.

    Args:
        resolve: `Library.resolve`.

    Raises:
        UsageError: an unknown setting.
        ModelNotFound: no such model.
    """
    spec, changes, last = "", {}, ""
    for number, part in enumerate(text.split(",")):
        key, equals, value = part.partition("=")
        key = key.strip().lower()
        if equals and key in KEYS:
            changes[key], last = value.strip(), key
        elif last and not equals:  # a list such as 0,2
            changes[last] += f",{part.strip()}"
        elif number == 0 or (not last and not equals):
            spec = f"{spec},{part}" if number else part
        else:
            raise UsageError(f"Unknown setting {key!r}.", f"Available settings: {', '.join(KEYS)}.")
    return Side.of(resolve(spec), changes)
