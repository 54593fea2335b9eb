"""Settings as form fields, made from the `Settings` struct: its types and limits decide what a field accepts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_type_hints

import msgspec

from cpuchat.setting_places import WANTED
from cpuchat.settings import Settings

Kind = Literal["switch", "choice", "theme", "preset", "whole", "number", "line", "text", "lines"]

# Tabs in order, each with its settings: key, label, and one line of help that names the neutral value.
TABS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Basics": (
        ("chat.system_prompt", "System prompt", "for new chats"),
        ("chat.preset", "Preset", "for new chats"),
        ("chat.max_tokens", "Max tokens", "per answer; 0 = no limit"),
        ("chat.reasoning", "Reasoning", "before the answer; auto = the model's default"),
        ("chat.reasoning_budget", "Reasoning budget", "tokens, then it answers; 0 = no limit"),
        ("sampling.temperature", "Temperature", "0 = greedy; higher = more random"),
        ("engine.ctx", "Context", "tokens; 0 = auto · from the next load"),
        ("speculation.drafters", "Drafters", "auto (all available), free (no draft model), off"),
        ("ui.theme", "Theme", "auto follows the terminal's background"),
        ("model.folders", "Model folders", "searched for GGUF files, one per line"),
        ("servers.urls", "Servers", "addresses of inference servers, one per line"),
    ),
    "Sampling": (
        ("sampling.top_k", "Top-k", "keep the k most likely tokens; 0 = off"),
        ("sampling.top_p", "Top-p", "keep the likeliest tokens up to this total probability; 1 = off"),
        ("sampling.min_p", "Min-p", "drop tokens below this share of the likeliest; 0 = off"),
        ("sampling.repeat_penalty", "Repeat penalty", "above 1 discourages repetition; 1 = off"),
        ("sampling.repeat_last_n", "Penalty window", "tokens that the penalties look back at"),
        ("sampling.presence_penalty", "Presence penalty", "once for every token already used; 0 = off"),
        ("sampling.frequency_penalty", "Frequency penalty", "for every use of a token; 0 = off"),
        ("sampling.seed", "Seed", "same seed, same answer; -1 = random"),
    ),
    "Speculation": (
        (
            "speculation.draft_model",
            "Draft model",
            "for all models: file, repository or none; empty = by model",
        ),
        ("speculation.depth", "Draft depth", "tokens drafted per pass; 0 = adaptive"),
        ("speculation.min_probability", "Min draft prob.", "a less likely token ends the draft; 0 = off"),
        ("speculation.draft_cores", "Draft cores", "auto, shared, CPUs such as 6,7, or l3:0 · from the next load"),
        ("speculation.across_chats", "Search other chats", "the suffix drafter searches earlier chats too"),
    ),
    "Engine": (
        ("engine.threads", "Threads", "0 = one per core"),
        ("engine.cores", "Cores", "auto, all, 0-7, l3:0-3, node:0, socket:0 or 4/l3"),
        ("engine.memory", "Memory policy", "auto, local, interleave, weighted, bind:0, preferred:0"),
        ("engine.batch", "Batch size", "prompt tokens per decode call"),
        ("engine.flash_attn", "Flash attention", "less memory traffic at long context"),
        ("engine.cache_type_k", "KV cache type, K", "q8_0 halves the KV cache"),
        ("engine.cache_type_v", "KV cache type, V", "below f16 it needs flash attention"),
        ("engine.load_mode", "Load mode", "mmap starts at once; read copies the file into memory"),
        ("engine.mlock", "Lock memory", "keep the weights from being swapped out"),
        ("engine.from_disk", "Weights on disk", "models larger than memory: read for every token, so slow"),
        ("engine.repack", "Repack weights", "faster kernels, but a second copy in memory"),
        ("engine.saved_kv_gb", "Saved KV caches", "GB of disk, and at most as much memory, to resume chats; 0 = off"),
        ("engine.experts", "Experts per token", "MoE models only; fewer are faster, less accurate; 0 = as trained"),
        ("engine.rpc", "RPC workers", "HOST:PORT,…: machines that hold layers that do not fit here"),
        ("engine.rpc_layers", "RPC layers", "layers on the RPC workers; 0 = those that do not fit here"),
        ("hardware.probe", "Probe", "measure read bandwidth and passes, once for each set of cores"),
        ("hardware.counters", "Counters", "read memory traffic and power while answering"),
        ("hardware.price_usd", "Price", "USD, of this machine, for plans; 0 = not known"),
        ("hardware.watts", "Power", "W at the wall under load, for plans; 0 = not known"),
    ),
    "Speech": (
        ("speech.answers", "Read answers aloud", "while they are written (Ctrl+S)"),
        ("speech.engine", "Engine", "auto = hibari if it is installed, else piper"),
        ("speech.voice", "Voice", "piper's voice, an .onnx file"),
        ("speech.speed", "Speed", "1 = normal speed; 0.5 to 2"),
        ("speech.cores", "Cores", "auto (cores that the model does not use), or CPUs such as 6,7"),
    ),
    "Appearance": (
        ("ui.telemetry", "Figures", "panel or line with live figures (F3)"),
        ("ui.sidebar", "Chat list", "at the left (F8)"),
        ("ui.show_reasoning", "Show reasoning", "unfolded (F7)"),
        ("ui.color_drafts", "Color drafted tokens", "by the drafter that proposed them (Ctrl+T)"),
        ("ui.motion", "Motion", "smooth scrolling and blinking cursors · from the next start"),
    ),
}
NOTES = {
    "Sampling": "Empty: the model's recommendation.",
    "Speech": "Without a sound device, answers are written to WAV files.",
    "Speculation": "Takes effect with the next answer unless noted.",
    "Engine": "Takes effect on the next load.",
    "Appearance": "Keys: Ctrl+P, Change keys. Your own themes: .toml files in themes, beside config.toml.",
}


@dataclass(frozen=True)
class Field:
    """One setting. `low`/`high` are inclusive; `choices` only for kind "choice". A setting whose `default`
    is None may be empty: then it is as the model has it."""

    section: str
    name: str
    kind: Kind
    label: str
    about: str
    default: Any
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    type: Any = None

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def rule(self) -> str:
        """Return the pattern of its text if there is one; else what the setting does."""
        return WANTED[self.key].removeprefix("must be ") if self.key in WANTED else self.about

    def shown(self, value: Any) -> Any:
        """Convert a value to the content of its widget."""
        if value is None:
            return ""
        if self.kind == "lines":
            return "\n".join(value)
        if self.kind in ("switch", "choice", "theme", "preset", "line", "text"):
            return value
        return f"{value:g}" if self.kind == "number" else str(value)

    def parse(self, shown: Any) -> Any:
        """Convert a widget's content to a value.

        Raises:
            ValueError: not acceptable; the message says what is.
        """
        if self.default is None and not str(shown).strip():
            return None
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
        if self.key in WANTED:
            return f"needs {self.rule}"
        if self.kind not in ("whole", "number"):
            return f"needs one of {', '.join(self.choices)}" if self.choices else "is not valid"
        noun = "a whole number" if self.kind == "whole" else "a number"
        low, high = self._bounds
        if low and high:
            return f"needs {noun} from {low} to {high}"
        return f"needs {noun}{' of' if low else ''} {self.limits}".rstrip()

    @property
    def limits(self) -> str:
        """`0 to 100` or `0 or more`; "" where there is no limit."""
        low, high = self._bounds
        if low and high:
            return f"{low} to {high}"
        return f"{low} or more" if low else ""

    @property
    def _bounds(self) -> tuple[str, str]:
        """Return the least and the greatest number, "" for none and for what only keeps it inside 64 bits."""
        low = "" if self.low is None else f"{self.low:g}"
        if self.high is None or self.high >= 1 << 53:
            return low, ""
        return low, f"{self.high:,g}" if self.high < 1e6 else f"{int(self.high):,}"

    @property
    def default_shown(self) -> str:
        """Return the default as the form shows it; "empty" where nothing is shown."""
        if self.kind == "switch":
            return "on" if self.default else "off"
        return str(self.shown(self.default)) or "empty"


def fields(tab: str) -> list[Field]:
    """Settings of one of `TABS`, in the order of the form."""
    return [_field(*row) for row in TABS[tab]]


def field(key: str) -> Field:
    """Return the setting `key`, such as "engine.cores"."""
    return next(_field(*row) for rows in TABS.values() for row in rows if row[0] == key)


def _field(key: str, label: str, about: str) -> Field:
    section, _, name = key.partition(".")
    struct = next(f.type for f in msgspec.structs.fields(Settings) if f.name == section)
    info = next(f for f in msgspec.structs.fields(struct) if f.name == name)
    default = info.default if info.default is not msgspec.NODEFAULT else info.default_factory()  # type: ignore[operator]
    annotation = _hints(struct)[name]
    kind: Kind = "line"
    choices: tuple[str, ...] = ()
    low = high = None
    info_of_type = msgspec.inspect.type_info(annotation)
    if isinstance(info_of_type, msgspec.inspect.UnionType):  # may be unset
        info_of_type = next(one for one in info_of_type.types if not isinstance(one, msgspec.inspect.NoneType))
    match info_of_type:
        case msgspec.inspect.BoolType():
            kind = "switch"
        case msgspec.inspect.LiteralType():
            # As they were written: msgspec sorts them.
            kind, choices = "choice", tuple(str(value) for value in annotation.__args__)
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType() as number:
            kind = "whole" if isinstance(number, msgspec.inspect.IntType) else "number"
            low, high = number.ge, number.le
        case msgspec.inspect.ListType():
            kind = "lines"
        case _:
            named: dict[str, Kind] = {"ui.theme": "theme", "chat.preset": "preset"}
            kind = named.get(key, "text" if name.endswith("prompt") else "line")
    return Field(section, name, kind, label, about, default, choices, low, high, annotation)


@cache
def _hints(struct: type) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def current(settings: Settings, field: Field) -> Any:
    return getattr(getattr(settings, field.section), field.name)
