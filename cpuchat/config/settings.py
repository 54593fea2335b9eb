"""The settings: their values, their file, and their checks.

`config.toml` is read with the standard library and checked by msgspec: an unknown key or a wrong value is an error
that names it. It is written only for what the user chose, and keeps the user's comments. What the app remembers by
itself (the last model, which panes are shown) is in a file of its own in the data folder (py).

How settings name CPUs, NUMA nodes and sockets.

Where the value of each setting comes from: an option, the environment, what the app remembers, or config.toml.

What the app remembers by itself, by the names that settings have: `state.json` in the data folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from cpuchat.base import paths, toml
from cpuchat.base.errors import SettingsError, UsageError
from cpuchat.base.files import file_lock, read_json, write_atomically
from cpuchat.config.servers import normalized, parse_workers
from cpuchat.protocol.drafters import CHOICES, DrafterChoice
from cpuchat.protocol.messages import MIN_CTX, CacheType, FlashAttention, LoadMode, LoadOptions, Sampling, Speculation

# Numbers of four digits at most: a range is spelled out when it is used.
_LIST = r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*"
_PLACES = rf"((l3|node|socket):)?{_LIST}"
Cores = Annotated[str, msgspec.Meta(pattern=rf"^(auto|all|\d{{1,4}}/l3|{_PLACES})$")]
DraftCores = Annotated[str, msgspec.Meta(pattern=rf"^(auto|shared|{_PLACES})$")]
SpeechCores = Annotated[str, msgspec.Meta(pattern=rf"^(auto|{_LIST})$")]
MemoryPolicy = Annotated[
    str, msgspec.Meta(pattern=rf"^(auto|local|(interleave|weighted)(:{_LIST})?|(bind|preferred):{_LIST})$")
]

# For values whose rule msgspec can only show as a regular expression.
WANTED = {
    "engine.cores": "must be auto, all, a list of CPUs such as 0-7, l3:0-3, node:0, socket:0, or 4/l3",
    "engine.memory": "must be auto, local, interleave, weighted, bind:0 or preferred:0 (with node numbers)",
    "speech.cores": "must be auto or a list of CPUs such as 6,7",
    "speculation.draft_cores": "must be auto, shared, a list of CPUs such as 4-7 or 2,3, l3:0, node:0 or socket:0",
}


def check_ranges(name: str, words: str) -> None:
    """Reject a range such as 7-4, in a list of CPUs or of places ("l3:3-0"), with ValueError."""
    for part in words.rpartition(":")[2].split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and last.isdigit() and int(last) < int(first):
            raise ValueError(f"{name}: the range {part} is reversed")


SETTINGS: Final = {"model": ("last",), "ui": ("sidebar", "telemetry")}
"""Settings that are remembered here instead of being written to config.toml, by section."""


class AppState(msgspec.Struct, omit_defaults=True):
    """None: not yet."""

    last: str | None = None
    sidebar: bool | None = None
    telemetry: bool | None = None
    light_terminals: tuple[str, ...] = ()
    """Those that reported a light background last, by name."""


def read_state() -> AppState:
    """Read the state; a missing or damaged file counts as empty."""
    try:
        return read_json(paths.state_file(), msgspec.json.Decoder(AppState).decode)
    except (OSError, ValueError):
        return AppState()


def update_state(values: dict[str, Any]) -> None:
    """Write some values. Raises OSError if the folder cannot be written."""
    file = paths.state_file()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file_lock(file.parent):
        write_atomically(file, msgspec.json.encode(msgspec.structs.replace(read_state(), **values)))


Count = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
SpeechEngine = Literal["auto", "hibari", "piper"]

Changes = dict[str, dict[str, Any]]  # values to set, by section and key


class Section(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of config.toml."""


class ModelSection(Section):
    """`last` is what the app opened last ("" = the demo model): a file, or the address of a model on a server. It is
    remembered; earlier versions kept it in config.toml. `folders` are searched for GGUF files."""

    last: str = ""
    folders: list[str] = []

    def __post_init__(self) -> None:
        if "\0" in "".join((self.last, *self.folders)):
            raise ValueError("a path contains a NUL character")


class ServersSection(Section):
    """`urls` of inference servers, whose models are listed with those of this machine."""

    urls: list[str] = []

    def __post_init__(self) -> None:
        for url in self.urls:
            try:
                normalized(url)
            except UsageError:  # without the address: it may hold a password
                raise ValueError("urls: must be addresses such as http://127.0.0.1:8080, without a password") from None


class EngineSection(Section):
    """Load options; 0 means "automatic". `experts`: how many a token uses in a mixture of experts.

    `cores` and `memory` are in the words of hardware.placement and hardware.numa.mempolicy. `rpc`: addresses of RPC
    workers, `HOST:PORT,HOST:PORT`, for a model that one machine cannot hold. `saved_kv_gb`: GB of disk, and at most
    as much memory (never more than half of what the model leaves free), for KV caches and checkpoints of chats.
    """

    threads: Count = 0
    cores: Cores = "auto"
    memory: MemoryPolicy = "auto"
    ctx: Annotated[int, msgspec.Meta(ge=0, le=16_777_216)] = 0
    batch: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 512
    ubatch: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 512
    flash_attn: FlashAttention = "auto"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    load_mode: LoadMode = "mmap"
    mlock: bool = False
    from_disk: bool = False
    repack: bool = True
    poll: Annotated[int, msgspec.Meta(ge=0, le=100)] = 50
    saved_kv_gb: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] = 2.0
    experts: Count = 0
    rpc: str = ""
    rpc_layers: Count = 0

    def __post_init__(self) -> None:
        if 0 < self.ctx < MIN_CTX:
            raise ValueError(f"ctx: {self.ctx} is below the minimum of {MIN_CTX}; 0 = automatic")
        check_ranges("cores", self.cores)
        check_ranges("memory", self.memory)
        try:
            parse_workers(self.rpc)
        except UsageError as error:
            raise ValueError(f"rpc: {error.message} {error.hint.rstrip('.')}") from None

    def load_options(self) -> LoadOptions:
        return LoadOptions(
            n_ctx=self.ctx,
            n_batch=self.batch,
            n_ubatch=min(self.ubatch, self.batch),
            poll=self.poll,
            type_k=self.cache_type_k,
            type_v=self.cache_type_v,
            flash_attn=self.flash_attn,
            load_mode=self.load_mode,
            mlock=self.mlock,
            from_disk=self.from_disk,
            use_repack=self.repack,
            n_experts=self.experts,
            rpc=parse_workers(self.rpc),
            rpc_layers=self.rpc_layers,
        )


class SpeculationSection(Section):
    """Drafters and draft depth (protocol.Speculation).

    `drafters` "auto" is the default ones of `protocol.drafters`, the draft model if one is loaded; "free" those
    that need no model. `draft_model` "" is the one that belongs to the model, if that is known; "none"; or what
    --model takes. `depth` 0 is adaptive. `draft_cores` see hardware.placement.PlacementSpec.
    """

    drafters: DrafterChoice = "auto"
    draft_model: str = ""
    depth: Annotated[int, msgspec.Meta(ge=0, le=31)] = 0
    min_probability: Share = 0.0
    draft_cores: DraftCores = "auto"
    across_chats: bool = False

    def __post_init__(self) -> None:
        check_ranges("draft_cores", self.draft_cores)
        if "\0" in self.draft_model:
            raise ValueError("draft_model contains a NUL character")

    @property
    def wanted_draft(self) -> str:
        """Return the argument for `models.drafts.choice.choose_draft`: "none" when no draft model is to be used."""
        return self.draft_model if "draft" in CHOICES[self.drafters] else "none"

    def speculation(self) -> Speculation:
        """Return how to draft one answer; the engine leaves out drafters that are not available."""
        return Speculation(
            drafters=CHOICES[self.drafters],
            depth=self.depth,
            min_probability=self.min_probability,
            across_chats=self.across_chats,
        )


class HardwareSection(Section):
    """Measurements. `probe`: of the read bandwidth and the passes of the cores in use, once for each set of cores.
    `counters`: read hardware counters of memory traffic and power while an answer is written. `price_usd` of this
    machine and its `watts` at the wall under load are for plans (0: not known).
    """

    probe: bool = True
    counters: bool = True
    price_usd: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    watts: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0


class SamplingSection(Section):
    """Sampling options (protocol.Sampling). None: as the model's publisher recommends it, else the default there.
    `seed` -1 draws a new one for each answer."""

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] | None = None
    top_k: Count | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    repeat_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=10.0)] | None = None
    repeat_last_n: Count | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = -1

    def sampling(self) -> Sampling:
        options: dict[str, Any] = msgspec.structs.asdict(self) | {"seed": None if self.seed < 0 else self.seed}
        return Sampling(**{name: value for name, value in options.items() if value is not None})

    def request_options(self) -> dict[str, Any]:
        """Return the fields of `Generate` that this section decides for every answer."""
        unset = tuple(name for name, value in msgspec.structs.asdict(self).items() if value is None)
        return {"sampling": self.sampling(), "unset": unset}


class ChatSection(Section):
    """Chats. `preset` (a name) is for new chats. `reasoning` auto: as its template. Limits in tokens, 0 = none."""

    preset: str = ""
    system_prompt: str = ""
    max_tokens: Count = 0
    reasoning: Literal["auto", "on", "off"] = "auto"
    reasoning_budget: Count = 0

    def request_options(self) -> dict[str, Any]:
        """Return the fields of `Generate` that this section decides for every answer."""
        return {
            "max_tokens": self.max_tokens,
            "reasoning": {"auto": None, "on": True, "off": False}[self.reasoning],
            "reasoning_budget": self.reasoning_budget or None,
        }


class SpeechSection(Section):
    """Reading aloud. `answers`: each one while it is written. `engine` "auto" is hibari if it is installed, else piper.
    `voice` is a voice file of piper. `speed` 1 is normal. `cores` "auto" are those that the model does not use, if any.
    """

    answers: bool = False
    engine: SpeechEngine = "auto"
    voice: str = ""
    speed: Annotated[float, msgspec.Meta(ge=0.5, le=2.0)] = 1.0
    cores: SpeechCores = "auto"

    def __post_init__(self) -> None:
        check_ranges("cores", self.cores)
        if "\0" in self.voice:
            raise ValueError("voice contains a NUL character")


class UiSection(Section):
    theme: str = "auto"  # cpuchat or cpuchat-light, by the terminal's background
    telemetry: bool = True
    sidebar: bool = True
    show_reasoning: bool = False
    color_drafts: bool = False
    motion: bool = True


class Settings(Section):
    """All of config.toml."""

    model: ModelSection = msgspec.field(default_factory=ModelSection)
    servers: ServersSection = msgspec.field(default_factory=ServersSection)
    engine: EngineSection = msgspec.field(default_factory=EngineSection)
    speculation: SpeculationSection = msgspec.field(default_factory=SpeculationSection)
    hardware: HardwareSection = msgspec.field(default_factory=HardwareSection)
    sampling: SamplingSection = msgspec.field(default_factory=SamplingSection)
    chat: ChatSection = msgspec.field(default_factory=ChatSection)
    speech: SpeechSection = msgspec.field(default_factory=SpeechSection)
    ui: UiSection = msgspec.field(default_factory=UiSection)

    def load_options(self, draft_path: str = "", *, calibrate: bool = True) -> LoadOptions:
        """Return how to load a model, with the draft model `draft_path` ("" = none) beside it.

        `calibrate`: what passes cost may be measured, if anything is to be drafted.
        """
        return msgspec.structs.replace(
            self.engine.load_options(),
            draft_path=draft_path,
            speculation=self.speculation.speculation() if draft_path else Speculation(),
            calibrate=calibrate and self.speculation.drafters != "off",
            probe=self.hardware.probe,
        )


def with_changes(chosen: Settings, changes: Changes) -> Settings:
    """Return a copy of `chosen` with `changes[section][key]` set."""
    sections = {name: msgspec.structs.replace(getattr(chosen, name), **values) for name, values in changes.items()}
    return msgspec.structs.replace(chosen, **sections)


def _with_environment(chosen: Settings) -> Settings:
    """Return a copy of `chosen` with the values of environment variables; lists are separated by commas.

    Raises:
        SettingsError: no such setting, or a wrong value (named).
    """
    changes: Changes = {}
    for key, variable in environment().items():
        section, _, name = key.partition(".")
        if name not in getattr(chosen, section).__struct_fields__:
            raise SettingsError(f"{variable}: no such setting.", "Unset it; F2 in the app lists the settings.")
        value: Any = os.environ[variable]
        if isinstance(getattr(getattr(chosen, section), name), list):
            value = [part.strip() for part in value.split(",") if part.strip()]
        try:
            converted = msgspec.convert({section: {name: value}}, Settings, strict=False)
        except msgspec.ValidationError as error:
            raise SettingsError(f"{variable}: {explained(error)[1]}.", "Change or unset it.") from None
        changes.setdefault(section, {})[name] = getattr(getattr(converted, section), name)
    return with_changes(chosen, changes)


def environment() -> dict[str, str]:
    """Return the environment variables that stand for settings and are not empty, by setting:
    `{"engine.threads": "CPUCHAT_ENGINE_THREADS"}`.
    """
    found = {}
    for variable, text in os.environ.items():
        prefix, _, rest = variable.partition("_")
        section, _, name = rest.lower().partition("_")
        if text and prefix == "CPUCHAT" and section in Settings.__struct_fields__ and name:
            found[f"{section}.{name}"] = variable
    return found


def load(file: Path | None = None) -> Settings:
    """Read the settings: the file, what the app remembers, and environment variables, each over the one before; a
    missing file means defaults.

    Args:
        file: this one alone instead.

    Raises:
        SettingsError: unreadable file, TOML error, unknown key or wrong value (named).
    """
    if file is not None:
        return parse(toml.read(file), str(file))
    chosen, known = load(paths.settings_file()), read_state()
    for section, names in SETTINGS.items():
        for name in names:
            if (value := getattr(known, name)) is not None:
                setattr(getattr(chosen, section), name, value)
    return _with_environment(chosen)


def parse(text: str, origin: str = "config.toml") -> Settings:
    """Parse settings. Raises SettingsError as `load` does."""
    try:
        return msgspec.convert(toml.parse(text, origin), Settings)
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        raise SettingsError(f"{origin}, {key or 'top level'}: {reason}.", "Fix or remove that key.") from None


def explained(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the wrong key ("engine.threads"; "" for the top level) and what is wrong with it."""
    reason, _, where = str(error).replace(" | null`", "`").partition(" - at ")
    key = where.strip("`").removeprefix("$").removesuffix("[...]").lstrip(".")
    field, colon, rest = reason.partition(": ")
    if colon and field.isidentifier():  # a rule of a whole section, which names the field
        key, reason = f"{key}.{field}".lstrip("."), rest
    if "matching regex" in reason:
        reason = WANTED.get(key, reason)
    return key, f"{reason[:1].lower()}{reason[1:]}"


def update(changes: dict[str, dict[str, Any]], file: Path | None = None) -> Settings:
    """Set `changes[section][key]` in the file as it is now and leave every other line and comment as it is; None
    removes the key. What the app remembers by itself goes to its own file.

    Returns the settings after the change. The file is replaced as `toml.change` does.

    Raises:
        SettingsError: the file on disk or the changed values are not valid; nothing is written then.
        OSError: one of the files cannot be written.
    """
    if file is not None:
        return _write(changes, file)
    chosen, by_itself = _divided(changes)
    _check(by_itself)
    if chosen:
        _write(chosen, paths.settings_file())
    if by_itself:
        update_state({name: value for values in by_itself.values() for name, value in values.items()})
    return load()


def _divided(changes: Changes) -> tuple[Changes, Changes]:
    """Divide the changes into those of the user and those that the app remembers."""
    chosen: Changes = {}
    by_itself: Changes = {}
    for section, values in changes.items():
        for name, value in values.items():
            into = by_itself if name in SETTINGS.get(section, ()) else chosen
            into.setdefault(section, {})[name] = value
    return chosen, by_itself


def _check(changes: Changes) -> None:
    """Check the changes. Raises SettingsError for invalid values."""
    try:
        msgspec.convert(changes, Settings)
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        raise SettingsError(f"{key}: {reason}.", "Choose another value.") from None


def _write(changes: Changes, file: Path) -> Settings:
    """Update as `update`, everything in one file."""

    def edit(document: Any) -> None:
        for section, values in changes.items():
            table = document.setdefault(section, {})
            for key, value in values.items():
                if value is None:
                    table.pop(key, None)
                else:
                    table[key] = value

    return toml.change(file, edit, lambda text: parse(text, str(file)))


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
            tables = toml.parse(toml.read(paths.settings_file()), "config.toml")
        except SettingsError:  # damaged since it was loaded
            tables = {}
        found = {
            f"{section}.{name}": "set in config.toml"
            for section, values in tables.items()
            if isinstance(values, dict)
            for name in values
        }
        state = read_state()
        for section, names in SETTINGS.items():
            found |= {f"{section}.{name}": "as in the last run" for name in names if getattr(state, name) is not None}
        given = environment() | self._options
        return found | {key: f"set by {name}" for key, name in given.items() if key not in self._saved}
