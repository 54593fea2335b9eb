"""The settings: their declarations, config.toml, and where each value comes from.

A setting is a field of a section. Its type has its bounds and a `Setting` with its words; `DECLARED` has all of them by
key ("engine.threads"), and the settings form, the command line and docs/settings.md follow from it.

`config.toml` is checked by msgspec: a wrong value is an error that names it; an unknown key, as of another version, is
left out (`unknown_keys`). It is written only for what the user chose, and keeps the user's comments. What the app
remembers by itself (the last model, which panes are shown) is in `state.json` in the data folder. Options replace both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from cpuchat.base import paths, toml
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import SettingsError, UsageError
from cpuchat.base.files import file_lock, read_json, write_atomically
from cpuchat.base.setting import Setting
from cpuchat.config.servers import normalized
from cpuchat.protocol.drafters import CHOICES, DrafterChoice
from cpuchat.protocol.messages import LoadOptions, Sampling, Speculation
from cpuchat.protocol.options import MIN_CTX, Count, DraftOptions, EngineOptions, Share

# Numbers of four digits at most: a range is spelled out when it is used. The description is what an error says in place
# of the pattern.
_LIST = r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*"
_PLACES = rf"((l3|node|socket):)?{_LIST}"
Cores = Annotated[
    str,
    Meta(
        pattern=rf"^(auto|all|\d{{1,4}}/l3|{_PLACES})$",
        description="auto, all, a list of CPUs such as 0-7, l3:0-3, node:0, socket:0, or 4/l3",
    ),
]
MemoryPolicy = Annotated[
    str,
    Meta(
        pattern=rf"^(auto|local|interleave(:{_LIST})?|(bind|preferred):{_LIST})$",
        description="auto, local, interleave, bind:0 or preferred:0 (with node numbers)",
    ),
]

_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)] | None

Changes = dict[str, dict[str, Any]]
"""Values to set, by section and key."""


def check_ranges(name: str, words: str) -> None:
    """Reject a range such as 7-4, in a list of CPUs or of places ("l3:3-0"), with ValueError."""
    for part in words.rpartition(":")[2].split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and last.isdigit() and int(last) < int(first):
            raise ValueError(f"{name}: the range {part} is reversed")


class SettingsSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of config.toml."""


class ChatSection(SettingsSection):
    """Chats."""

    system_prompt: Annotated[str, Setting("System prompt", "for new chats")] = ""
    max_tokens: Annotated[Count, Setting("Max tokens", "per answer; 0 = no limit", is_option=True)] = 0
    reasoning: Annotated[
        Literal["auto", "on", "off"],
        Setting("Reasoning", "before the answer; auto = the model's default", is_option=True),
    ] = "auto"
    reasoning_budget: Annotated[
        Count, Setting("Reasoning budget", "tokens, then it answers; 0 = no limit", is_option=True)
    ] = 0

    def request_options(self) -> dict[str, Any]:
        """Return the fields of `Generate` that this section decides for every answer."""
        return {
            "max_tokens": self.max_tokens,
            "reasoning": {"auto": None, "on": True, "off": False}[self.reasoning],
            "reasoning_budget": self.reasoning_budget or None,
        }


class SamplingSection(SettingsSection):
    """Sampling options (protocol.Sampling). None: as the model's publisher recommends it, else the default there.
    `seed` -1 draws a new one for each answer."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0.0, le=10.0)] | None,
        Setting("Temperature", "0 = greedy; higher = more random", is_basic=True, is_option=True),
    ] = None
    top_k: Annotated[Count | None, Setting("Top-k", "keep the k most likely tokens; 0 = off", is_option=True)] = None
    top_p: Annotated[
        Share | None,
        Setting("Top-p", "keep the likeliest tokens up to this total probability; 1 = off", is_option=True),
    ] = None
    min_p: Annotated[
        Share | None, Setting("Min-p", "drop tokens below this share of the likeliest; 0 = off", is_option=True)
    ] = None
    repeat_penalty: Annotated[
        Annotated[float, Meta(ge=0.01, le=10.0)] | None,
        Setting("Repeat penalty", "above 1 discourages repetition; 1 = off", is_option=True),
    ] = None
    repeat_last_n: Annotated[Count | None, Setting("Penalty window", "tokens that the penalties look back at")] = None
    presence_penalty: Annotated[
        _Penalty,
        Setting("Presence penalty", "once for every token already used; 0 = off"),
    ] = None
    frequency_penalty: Annotated[_Penalty, Setting("Frequency penalty", "for every use of a token; 0 = off")] = None
    seed: Annotated[
        int, Meta(ge=-1, le=(1 << 63) - 1), Setting("Seed", "same seed, same answer; -1 = random", is_option=True)
    ] = -1

    def sampling(self) -> Sampling:
        options: dict[str, Any] = msgspec.structs.asdict(self) | {"seed": None if self.seed < 0 else self.seed}
        return Sampling(**{name: value for name, value in options.items() if value is not None})

    def request_options(self) -> dict[str, Any]:
        """Return the fields of `Generate` that this section decides for every answer."""
        unset = tuple(name for name, value in msgspec.structs.asdict(self).items() if value is None)
        return {"sampling": self.sampling(), "unset": unset}


class EngineSection(EngineOptions, SettingsSection):
    """Where the engine computes, and how it loads a model. 0 means "automatic".

    `cores` and `memory` are in the words of hardware.placement and hardware.numa.mempolicy. `saved_kv_gb` never takes
    more memory than half of what the model leaves free. Fields that are not keyword-only come before inherited ones, so
    these are the first in the form, too."""

    threads: Annotated[Count, Setting("Threads", "0 = one per core", is_option=True)] = 0
    cores: Annotated[
        Cores, Setting("Cores", "auto, all, 0-7, l3:0-3, node:0, socket:0 or 4/l3", is_option=True, metavar="LIST")
    ] = "auto"
    memory_policy: Annotated[
        MemoryPolicy,
        Setting(
            "Memory policy", "auto, local, interleave, bind:0, preferred:0 (NUMA)", is_option=True, metavar="POLICY"
        ),
    ] = "auto"
    saved_kv_gb: Annotated[
        float,
        Meta(ge=0, le=1_000_000),
        Setting("Saved KV caches", "GB of disk, and at most as much memory, to resume chats; 0 = off"),
    ] = 2.0

    def __post_init__(self) -> None:
        if 0 < self.n_ctx < MIN_CTX:
            raise ValueError(f"ctx: {self.n_ctx} is below the minimum of {MIN_CTX}; 0 = automatic")
        check_ranges("cores", self.cores)
        check_ranges("memory_policy", self.memory_policy)

    def load_options(self) -> LoadOptions:
        options = LoadOptions(**{name: getattr(self, name) for name in EngineOptions.__struct_fields__})
        return msgspec.structs.replace(options, n_ubatch=min(self.n_ubatch, self.n_batch))


class SpeculationSection(DraftOptions, SettingsSection):
    """Drafters (`protocol.drafters`) and draft depth (protocol.Speculation). `draft_model` "": the one that belongs to
    the model, if that is known; "none"; or what --model takes."""

    drafters: Annotated[
        DrafterChoice,
        Setting("Drafters", "auto (all available), draft, suffix (no draft model), off", is_basic=True, is_option=True),
    ] = "auto"
    draft_model: Annotated[
        str,
        Setting(
            "Draft model",
            "file, repository, mtp (the model's own head) or none; empty = by model",
            is_option=True,
            metavar="FILE|REPO|mtp|none",
        ),
    ] = ""

    def __post_init__(self) -> None:
        if "\0" in self.draft_model:
            raise ValueError("draft_model contains a NUL character")

    @property
    def wanted_draft(self) -> str:
        """Return the argument for `models.drafts.choice.choose_draft`: "none" when no draft model is to be used."""
        return self.draft_model if "draft" in CHOICES[self.drafters] else "none"

    def speculation(self) -> Speculation:
        """Return how to draft one answer; the engine leaves out drafters that are not available."""
        options = {name: getattr(self, name) for name in DraftOptions.__struct_fields__}
        return Speculation(drafters=CHOICES[self.drafters], **options)


class HardwareSection(SettingsSection):
    """Measurements."""

    probe: Annotated[bool, Setting("Probe", "measure read bandwidth and passes, once for each set of cores")] = True
    counters: Annotated[bool, Setting("Counters", "read memory traffic and power while answering")] = True


class SpeechSection(SettingsSection):
    """Reading aloud."""

    answers: Annotated[bool, Setting("Read answers aloud", "while they are written (Ctrl+S)")] = False
    speed: Annotated[float, Meta(ge=0.5, le=2.0), Setting("Speed", "1 = normal speed", is_option=True)] = 1.0


class UiSection(SettingsSection):
    # auto: cpuchat or cpuchat-light
    theme: Annotated[str, Setting("Theme", "auto follows the terminal's background", is_basic=True)] = "auto"
    telemetry: Annotated[bool, Setting("Figures", "panel or line with live figures (F3)")] = True
    all_figures: Annotated[bool, Setting("All figures", "each with its source, in the panel (F3 twice)")] = False
    sidebar: Annotated[bool, Setting("Chat list", "at the left (F8)")] = True
    show_reasoning: Annotated[bool, Setting("Show reasoning", "unfolded (F7)")] = False
    color_drafts: Annotated[bool, Setting("Color drafts", "drafted tokens by what proposed them (Ctrl+T)")] = False
    motion: Annotated[bool, Setting("Motion", "smooth scrolling and blinking cursors", takes_effect="start")] = True


class ModelSection(SettingsSection):
    """`last` is the model used last ("" = the demo model), in `state.json`: the file that app, `ask`, `serve` or `why`
    loaded, or the address of a model on a server that the app opened."""

    last: str = ""
    folders: Annotated[list[str], Setting("Model folders", "searched for GGUF files, one per line")] = []

    def __post_init__(self) -> None:
        if "\0" in "".join((self.last, *self.folders)):
            raise ValueError("a path contains a NUL character")


class ServersSection(SettingsSection):
    urls: Annotated[list[str], Setting("Servers", "addresses of inference servers, one per line")] = []

    def __post_init__(self) -> None:
        for url in self.urls:
            try:
                normalized(url)
            except UsageError:  # without the address: it may hold a password
                raise ValueError("urls: must be addresses such as http://127.0.0.1:8080, without a password") from None


class Settings(SettingsSection):
    """All of config.toml."""

    chat: ChatSection = msgspec.field(default_factory=ChatSection)
    sampling: SamplingSection = msgspec.field(default_factory=SamplingSection)
    engine: EngineSection = msgspec.field(default_factory=EngineSection)
    speculation: SpeculationSection = msgspec.field(default_factory=SpeculationSection)
    hardware: HardwareSection = msgspec.field(default_factory=HardwareSection)
    speech: SpeechSection = msgspec.field(default_factory=SpeechSection)
    ui: UiSection = msgspec.field(default_factory=UiSection)
    model: ModelSection = msgspec.field(default_factory=ModelSection)
    servers: ServersSection = msgspec.field(default_factory=ServersSection)

    def load_options(self, draft_path: str = "", *, calibrate: bool = True) -> LoadOptions:
        """Return how to load a model and the draft `draft_path` ("": none). `calibrate`: pass costs may be measured."""
        return msgspec.structs.replace(
            self.engine.load_options(),
            draft_path=draft_path,
            calibrate=calibrate and self.speculation.drafters != "off",
        )


@dataclass(frozen=True)
class DeclaredSetting:
    """A setting as its section declares it: `name` is its key there, `field` the attribute, `type` the annotation."""

    section: str
    name: str
    field: str
    type: Any
    default: Any
    words: Setting

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def option(self) -> str:
        """Return its flag on the command line."""
        return self.words.option or f"--{self.name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """Return what `--help` says of its option."""
        label, about = self.words.label, self.words.about
        if label.lower().replace(" ", "-") != self.option.removeprefix("--"):
            return f"{label}: {about}."
        return f"{about if about.startswith('auto') else about[:1].upper() + about[1:]}."  # a value stays as it is

    @property
    def takes_effect(self) -> str:
        """Return "load" or "start" if it waits for that, "" if it counts from the next answer."""
        return self.words.takes_effect or ("load" if self.section == "engine" else "")

    @property
    def limits(self) -> str:
        """`0 to 100` or `0 or more`; "" where there is no limit, or one that only keeps it inside 64 bits."""
        info = msgspec.inspect.type_info(self.type)
        if isinstance(info, msgspec.inspect.UnionType):  # may be unset
            info = next(one for one in info.types if not isinstance(one, msgspec.inspect.NoneType))
        low, high = getattr(info, "ge", None), getattr(info, "le", None)
        if low is None:
            return ""
        return f"{low:g} or more" if high is None or high >= 1 << 53 else f"{low:g} to {high:,.10g}"

    @property
    def wanted(self) -> str:
        """Return what its text must be, "" where any will do: `auto or a list of CPUs such as 6,7`."""
        return next((one.description or "" for one in get_args(self.type)[1:] if isinstance(one, Meta)), "")


DECLARED: Final[dict[str, DeclaredSetting]] = {}
"""All settings by key ("engine.threads"), in the order of the settings form."""
for _section, _struct in get_type_hints(Settings).items():
    _types = get_type_hints(_struct, include_extras=True)
    for _info in msgspec.structs.fields(_struct):
        _annotation = _types[_info.name]
        _words = next((one for one in get_args(_annotation) if isinstance(one, Setting)), Setting())
        _value = _info.default if _info.default is not msgspec.NODEFAULT else _info.default_factory()  # type: ignore[operator]
        _setting = DeclaredSetting(_section, _info.encode_name, _info.name, _annotation, _value, _words)
        DECLARED[_setting.key] = _setting


def value_of(chosen: Settings, key: str) -> Any:
    """Return the value of a setting such as "engine.threads"."""
    setting = DECLARED[key]
    return getattr(getattr(chosen, setting.section), setting.field)


def with_changes(chosen: Settings, changes: Changes) -> Settings:
    """Return a copy of `chosen` with `changes[section][key]` set."""
    sections = {
        section: msgspec.structs.replace(
            getattr(chosen, section), **{DECLARED[f"{section}.{name}"].field: value for name, value in values.items()}
        )
        for section, values in changes.items()
    }
    return msgspec.structs.replace(chosen, **sections)


OF_CHAT: Final = (
    *(key for key in DECLARED if key.startswith("sampling.")), "chat.reasoning", "chat.reasoning_budget", "engine.ctx",
)  # fmt: skip
"""Settings that a chat may have values of its own for, beside its system prompt."""


def valid_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `OF_CHAT` that are valid, by key: chats may come from another version, or be damaged."""
    found: dict[str, Any] = {}
    for key in filter(values.__contains__, OF_CHAT):
        with contextlib.suppress(ValueError):
            value = msgspec.convert(values[key], prepared(DECLARED[key].type))
            with_changes(Settings(), {DECLARED[key].section: {DECLARED[key].name: value}})
            found[key] = value
    return found


REMEMBERED: Final = {"model": ("last",), "ui": ("sidebar", "telemetry")}
"""Settings that the app remembers by itself in `state.json`, by section; the user need not choose them."""


class AppState(msgspec.Struct, omit_defaults=True):
    """Content of `state.json`, by the names that settings have. None: not yet."""

    last: str | None = None
    sidebar: bool | None = None
    telemetry: bool | None = None
    light_terminals: tuple[str, ...] = ()
    """Those that reported a light background last, by name."""


def read_state() -> AppState:
    """Read the state; a missing or damaged file counts as empty."""
    try:
        return read_json(paths.state_file(), msgspec.json.Decoder(prepared(AppState)).decode)
    except (OSError, ValueError):
        return AppState()


def update_state(values: dict[str, Any]) -> None:
    """Write some values. Raises OSError if the folder cannot be written."""
    file = paths.state_file()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file_lock(file.parent):
        write_atomically(file, msgspec.json.encode(msgspec.structs.replace(read_state(), **values)))


def _remembered() -> Changes:
    known = {name: value for name, value in msgspec.structs.asdict(read_state()).items() if value is not None}
    return {section: {name: known[name] for name in names if name in known} for section, names in REMEMBERED.items()}


def load() -> Settings:
    """Read the settings: the file, and what the app remembers over it; a missing file means defaults. Raises
    SettingsError: unreadable file, TOML error, wrong value (named)."""
    file = paths.settings_file()
    return with_changes(parse(toml.read(file), str(file)), _remembered())


def parse(text: str, origin: str = "config.toml") -> Settings:
    """Parse settings, without unknown keys. Raises SettingsError as `load` does."""
    tables = toml.parse(text, origin)
    for *section, key in _unknown(tables):
        del (tables[section[0]] if section else tables)[key]
    try:
        return msgspec.convert(tables, prepared(Settings))
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        raise SettingsError(f"{origin}, {key or 'top level'}: {reason}.", "Fix or remove that key.") from None


def _unknown(tables: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the unknown sections, and the unknown keys of the others with their section. Either may have dots."""
    sections = Settings.__struct_fields__
    keys = [(section, key) for section in sections if isinstance(tables.get(section), dict) for key in tables[section]]
    return [*((one,) for one in tables if one not in sections), *(one for one in keys if ".".join(one) not in DECLARED)]


def unknown_keys() -> list[str]:
    """Return the keys of config.toml that are no settings, and so are left out; none of a file that is not valid."""
    try:
        return [".".join(key) for key in _unknown(toml.parse(toml.read(paths.settings_file()), "config.toml"))]
    except SettingsError:
        return []


_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "array": "a list",
          "object": "a table"}  # fmt: skip
"""Types of msgspec's messages."""


def explained(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the wrong key ("engine.threads"; "" for the top level) and what is wrong with it."""
    reason, _, where = str(error).replace(" | null`", "`").partition(" - at ")
    key = where.strip("`").removeprefix("$").removesuffix("[...]").lstrip(".")
    field, colon, rest = reason.partition(": ")
    if colon and field.isidentifier():  # a rule of a whole section, which names the field
        key, reason = f"{key}.{field}".lstrip("."), rest
    declared = DECLARED.get(".".join(key.split(".")[-2:]))  # a preset's begins with its name
    if declared is not None and any(rule in reason for rule in ("<=", ">=", "matching regex")):
        reason = f"must be {declared.wanted or declared.limits}"
    elif declared is not None and reason.startswith("Invalid enum value"):
        reason = f"must be one of {', '.join(get_args(get_args(declared.type)[0]))}"
    for kind, words in _KINDS.items():
        reason = reason.replace(f"`{kind}`", words)
    return key, f"{reason[:1].lower()}{reason[1:]}"


def update(changes: Changes) -> Settings:
    """Set `changes[section][key]` in the file as it is now, as `toml.change` does; None removes the key. What the app
    remembers by itself goes to its own file. Returns the settings after the change. Raises SettingsError: the file on
    disk or the changed values are not valid; nothing is written; OSError: a file cannot be written."""
    chosen: Changes = {}
    by_itself: Changes = {}
    for section, values in changes.items():
        for name, value in values.items():
            into = by_itself if name in REMEMBERED.get(section, ()) else chosen
            into.setdefault(section, {})[name] = value
    try:
        msgspec.convert(by_itself, prepared(Settings))
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        raise SettingsError(f"{key}: {reason}.", "Choose another value.") from None

    def edit(document: Any) -> None:
        for section, values in chosen.items():
            table = document.setdefault(section, {})
            for key, value in values.items():
                if value is None:
                    table.pop(key, None)
                else:
                    table[key] = value

    if chosen:
        file = paths.settings_file()
        toml.change(file, edit, lambda text: parse(text, str(file)))
    if by_itself:
        update_state({name: value for values in by_itself.values() for name, value in values.items()})
    return load()


class SettingSources:
    """The sources of the settings of one run. `options`: options of the command line by the setting that each
    overrides: `{"engine.threads": "--threads"}`."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = dict(options or {})
        self._saved: set[str] = set()

    def saved(self, changes: Changes) -> None:
        """Take note of saved settings, which replace options for the rest of the run."""
        self._saved |= {f"{section}.{name}" for section, values in changes.items() for name in values}

    def read(self) -> dict[str, str]:
        """Return the source of each setting that is not default, in words: `set by --threads`. Reads small files."""
        try:
            tables = toml.parse(toml.read(paths.settings_file()), "config.toml")
        except SettingsError:  # damaged since it was loaded
            tables = {}
        found = {
            f"{section}.{name}": "set in config.toml"
            for section, values in tables.items()
            if isinstance(values, dict)
            for name in values
        }
        found |= {
            f"{section}.{name}": "as in the last run" for section, names in _remembered().items() for name in names
        }
        return found | {key: f"set by {name}" for key, name in self._options.items() if key not in self._saved}
