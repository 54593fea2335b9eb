"""The settings as a form, made from the `Settings` struct: its types and limits decide what a field takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import msgspec

from cpuchat.settings import Settings

Kind = Literal["switch", "choice", "theme", "whole", "number", "line", "text", "lines"]

SECTIONS = {
    "sampling": "Sampling",
    "chat": "Chat",
    "speculation": "Drafting · takes effect with the next answer",
    "engine": "Engine · takes effect when a model is loaded",
    "hardware": "Hardware",
    "ui": "Look",
    "model": "Models",
}
# Kept by the app, not set by hand.
_HIDDEN = frozenset({"model.last"})

# Label, and one line of help: what it does, and what its neutral value is.
_ABOUT: dict[str, tuple[str, str]] = {
    "sampling.temperature": ("Temperature", "0 takes the likeliest word each time; higher is freer"),
    "sampling.top_k": ("Top-k", "only the k likeliest tokens; 0 = off"),
    "sampling.top_p": ("Top-p", "only the likeliest that add up to this share; 1 = off"),
    "sampling.min_p": ("Min-p", "nothing below this share of the likeliest; 0 = off"),
    "sampling.repeat_penalty": ("Repeat penalty", "above 1 makes repeating less likely; 1 = off"),
    "sampling.repeat_last_n": ("Penalty window", "tokens back that the penalties look at"),
    "sampling.presence_penalty": ("Presence penalty", "once for every token already used; 0 = off"),
    "sampling.frequency_penalty": ("Frequency penalty", "for every use of a token; 0 = off"),
    "sampling.seed": ("Seed", "same seed, same answer; -1 = a new one each time"),
    "chat.system_prompt": ("System prompt", "said to the model before every new chat"),
    "chat.max_tokens": ("Longest answer", "tokens; 0 = until the model ends"),
    "engine.threads": ("Threads", "0 = one for each of the cores below"),
    "engine.cores": ("Cores", "auto, all, 0-7, l3:0-3, node:0, socket:0 or 4/l3"),
    "engine.memory": ("Memory policy", "auto, local, interleave, weighted, bind:0, …"),
    "engine.ctx": ("Context", "tokens the model can see; 0 = choose for me"),
    "engine.batch": ("Batch", "prompt tokens per call"),
    "engine.ubatch": ("Micro-batch", "prompt tokens computed at once"),
    "engine.flash_attn": ("Flash attention", "less memory traffic for long contexts"),
    "engine.cache_type_k": ("KV type, keys", "q8_0 halves the KV cache's memory"),
    "engine.cache_type_v": ("KV type, values", "below f16 it needs flash attention"),
    "engine.load_mode": ("Load mode", "mmap starts at once; read copies into memory"),
    "engine.mlock": ("Lock memory", "keep the weights from being swapped out"),
    "engine.repack": ("Repack weights", "a second, faster arrangement; costs memory"),
    "engine.poll": ("Polling", "0-100: how hard waiting threads spin"),
    "engine.saved_kv_gb": ("Saved KV", "GB on disk, so that chats go on quickly; 0 = none"),
    "engine.experts": ("Experts", "of a mixture, per token; fewer cost quality; 0 = all"),
    "speculation.drafters": ("Drafters", "auto: all; free: those without a draft model; off"),
    "speculation.draft_model": ("Draft model", "when loading: file, repository or none; empty = auto"),
    "speculation.depth": ("Depth", "tokens guessed per pass; 0 = adaptive"),
    "speculation.min_probability": ("Least probability", "a guess less likely than this ends the draft; 0 = off"),
    "speculation.draft_cores": ("Draft cores", "when loading: auto, shared, CPUs such as 6,7, or l3:0"),
    "speculation.across_chats": ("Across chats", "suffix drafter: look into earlier chats too"),
    "hardware.probe": ("Measure bandwidth", "of the cores in use, once, when a model is loaded"),
    "hardware.counters": ("Counters", "look for counters of memory traffic and power"),
    "ui.theme": ("Theme", "also in the palette, with a preview"),
    "ui.telemetry": ("Figures", "the panel or line with the figures (F3)"),
    "ui.sidebar": ("Chats", "the list at the left (F8)"),
    "ui.show_reasoning": ("Show reasoning", "unfold what the model thinks (F7)"),
    "ui.color_drafts": ("Mark drafts", "text shown by who proposed it (Ctrl+T)"),
    "model.folders": ("Folders", "searched for GGUF files, one per line"),
}


# What a field takes whose rule is a pattern.
_WANTS = {
    "engine.cores": "needs auto, all, CPUs such as 0-7, l3:0-3, node:0, socket:0 or 4/l3",
    "engine.memory": "needs auto, local, interleave, weighted, bind:0 or preferred:0",
    "speculation.draft_cores": "needs auto, shared, CPUs such as 4-7 or 2,3, or l3:0, node:0 or socket:0",
}


@dataclass(frozen=True)
class Field:
    """One setting. `low`/`high` are inclusive unless `open_low`; `choices` only for kind "choice"."""

    section: str
    name: str
    kind: Kind
    label: str
    about: str
    default: Any
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    type: Any = None

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    def shown(self, value: Any) -> Any:
        """What the widget holds for a value."""
        if self.kind == "lines":
            return "\n".join(value)
        if self.kind in ("switch", "choice", "theme", "line", "text"):
            return value
        return f"{value:g}" if self.kind == "number" else str(value)

    def parse(self, shown: Any) -> Any:
        """The value that a widget's content stands for.

        Raises:
            ValueError: not acceptable; the message says what is.
        """
        if self.kind == "lines":
            value: Any = [line.strip() for line in str(shown).splitlines() if line.strip()]
        elif self.kind in ("whole", "number"):
            text = str(shown).strip().replace(",", ".") if self.kind == "number" else str(shown).strip()
            try:
                value = int(text) if self.kind == "whole" else float(text)
            except ValueError:
                raise ValueError(self.wants) from None
        else:
            value = shown
        try:
            return msgspec.convert(value, self.type)
        except msgspec.ValidationError:
            raise ValueError(self.wants) from None

    @property
    def wants(self) -> str:
        """`needs a whole number from 0 to 100`."""
        if self.key in _WANTS:
            return _WANTS[self.key]
        if self.kind not in ("whole", "number"):
            return f"needs one of {', '.join(self.choices)}" if self.choices else "is not acceptable"
        noun = "a whole number" if self.kind == "whole" else "a number"
        low = None if self.low is None else f"{self.low:g}"
        # Limits that only keep the number inside 64 bits say nothing to a reader.
        high = None if self.high is None or self.high >= 1 << 53 else f"{self.high:,g}" if self.high < 1e6 else (
            f"{int(self.high):,}")  # fmt: skip
        if low is not None and high is not None:
            return f"needs {noun} {'above ' + low + ', at most' if self.open_low else 'from ' + low + ' to'} {high}"
        if low is not None:
            return f"needs {noun} {'above ' + low if self.open_low else 'of ' + low + ' or more'}"
        return f"needs {noun}"


def fields() -> list[Field]:
    """Every setting that a person sets, in the order of the form."""
    found: list[Field] = []
    sections = {f.name: f.type for f in msgspec.structs.fields(Settings)}
    for section in [*SECTIONS, *(s for s in sections if s not in SECTIONS)]:
        struct = sections[section]
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            if f"{section}.{field.name}" not in _HIDDEN:
                default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[operator]
                found.append(_field(section, field.name, hints[field.name], default))
    return found


def _field(section: str, name: str, annotation: Any, default: Any) -> Field:
    key = f"{section}.{name}"
    label, about = _ABOUT.get(key, (name.replace("_", " ").capitalize(), ""))
    info = msgspec.inspect.type_info(annotation)
    kind: Kind = "line"
    choices: tuple[str, ...] = ()
    low = high = None
    open_low = False
    match info:
        case msgspec.inspect.BoolType():
            kind = "switch"
        case msgspec.inspect.LiteralType():
            kind, choices = "choice", _in_order(annotation)
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            kind = "whole" if isinstance(info, msgspec.inspect.IntType) else "number"
            low, high, open_low = info.ge, info.le, info.gt is not None
            low = info.gt if open_low else low
        case msgspec.inspect.ListType():
            kind = "lines"
        case _:
            kind = "theme" if key == "ui.theme" else "text" if name.endswith("prompt") else "line"
    return Field(section, name, kind, label, about, default, choices, low, high, open_low, annotation)


def _in_order(annotation: Any) -> tuple[str, ...]:
    """Literal values as they were written (msgspec sorts them)."""
    return tuple(str(value) for value in annotation.__args__)


def current(settings: Settings, field: Field) -> Any:
    """The value of a field in `settings`."""
    return getattr(getattr(settings, field.section), field.name)


def with_changes(settings: Settings, changes: dict[str, dict[str, Any]]) -> Settings:
    """A copy of `settings` with `changes[section][key]` set; what only this run was told stays."""
    sections = {name: msgspec.structs.replace(getattr(settings, name), **values) for name, values in changes.items()}
    return msgspec.structs.replace(settings, **sections)
