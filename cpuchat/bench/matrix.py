"""Expands what is measured: the product of models, quantizations, drafters, threads, cores, memory policies, KV types
and flash attention, each with every test. Prompts of four kinds differ in how well they can be drafted.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import msgspec

from cpuchat.base import toml
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import UsageError
from cpuchat.config.servers import last_here
from cpuchat.config.settings import DECLARED, Cores, MemoryPolicy, Settings, explained, value_of, with_changes
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.models.drafts.choice import choose_draft
from cpuchat.models.gguf.header import known_as
from cpuchat.models.library.library import Library
from cpuchat.models.machine import GROUPS, with_tuned
from cpuchat.protocol.drafters import CHOICES, DrafterChoice
from cpuchat.protocol.options import UNQUANTIZED, CacheType, FlashAttention

Kind = Literal["code", "summary", "maths", "chat"]


class BenchPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One user message; `name` is unique."""

    kind: Kind
    name: str
    text: str


def load() -> list[BenchPrompt]:
    """Return the built-in prompts, each kind's together."""
    text = (importlib.resources.files("cpuchat.bench") / "prompts.toml").read_text(encoding="utf-8")
    prompts = msgspec.convert(toml.loads(text)["prompt"], prepared(list[BenchPrompt]))
    return [msgspec.structs.replace(prompt, text=prompt.text.strip()) for prompt in prompts]


KINDS: tuple[Kind, ...] = get_args(Kind)
OFF: Final = "off"
_MAX_DEPTH = 31


class BenchWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: a kind of prompts, or llama-bench's `pp512`, `tg128 @ d4096`. `depth`: tokens in the KV cache before.
    `users` ask at once, each with a prompt of the kind."""

    kind: Literal["prompts", "pp", "tg"]
    name: str
    n_prompt: int = 0
    n_gen: int = 0
    depth: int = 0
    users: int = 1

    @property
    def words(self) -> str:
        return f"{self.name} × {self.users} users" if self.users > 1 else self.name

    @classmethod
    def random(cls, kind: Literal["pp", "tg"], tokens: int, depth: int) -> BenchWorkload:
        name = f"{kind}{tokens}" + (f" @ d{depth}" if depth else "")
        n_prompt, n_gen = (tokens, 0) if kind == "pp" else (0, tokens)
        return cls(kind=kind, name=name, n_prompt=n_prompt, n_gen=n_gen, depth=depth)


VARIED: Final[dict[str, tuple[str, ...]]] = {
    "threads": ("threads",),
    "cores": ("cores",),
    "memory_policies": ("memory_policy",),
    "kv_types": ("cache_type_k", "cache_type_v"),
    "flash_attn": ("flash_attn",),
}
"""Lists of a matrix, and the settings of the section engine that they vary; one value for each of two: `q8_0/f16`."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is loaded: cells with the same are measured without loading again. `draft` "": none is loaded.

    The other fields are settings of the section engine, by their keys; `batch`, `ubatch` 0: as they are set."""

    model: str
    draft: str = ""
    threads: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    cores: Cores = "auto"
    memory_policy: MemoryPolicy = "auto"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    flash_attn: FlashAttention = "auto"
    batch: int = 0
    ubatch: int = 0

    def settings(self, chosen: Settings) -> Settings:
        """Return the settings with those that the setup has in their place."""
        engine = {name: getattr(self, name) for name in self.__struct_fields__ if f"engine.{name}" in DECLARED}
        for name in ("batch", "ubatch"):
            engine[name] = engine[name] or value_of(chosen, f"engine.{name}")
        return with_changes(chosen, {"engine": engine})


class BenchCell(msgspec.Struct, frozen=True, kw_only=True):
    """One setup, its drafters and its test. `draft_depth` 0: adaptive."""

    setup: Setup
    test: BenchWorkload
    drafters: DrafterChoice = OFF
    draft_depth: int = 0

    @property
    def drafting(self) -> str:
        """The drafters as they are given: `off`, `auto`, `draft:4`."""
        return f"{self.drafters}:{self.draft_depth}" if self.draft_depth else self.drafters

    @property
    def words(self) -> str:
        """Name it in a progress line."""
        return f"{known_as(Path(self.setup.model))} · {self.drafting} · {self.test.words}"

    @property
    def plain(self) -> BenchCell:
        """The cell that this one's speed-up refers to: plain decoding."""
        return msgspec.structs.replace(self, drafters=OFF, draft_depth=0)


def workloads(
    prompts: Sequence[Kind] = (), tokens: int = 128, pp: Sequence[int] = (), tg: Sequence[int] = (),
    depth: Sequence[int] = (0,), users: Sequence[int] = (),
) -> list[BenchWorkload]:  # fmt: skip
    """Return the tests: `pp` and `tg` random tokens at each `depth`; without them, or for `users`, prompts, by default
    all kinds, of `tokens` tokens each."""
    found: list[BenchWorkload] = []
    for at in dict.fromkeys(depth):
        found += [BenchWorkload.random("pp", n, at) for n in dict.fromkeys(pp)]
        found += [BenchWorkload.random("tg", n, at) for n in dict.fromkeys(tg)]
    kinds = prompts or ([] if found and not users else KINDS)
    for kind, n in itertools.product(dict.fromkeys(kinds), dict.fromkeys(users or (1,))):
        found.append(BenchWorkload(kind="prompts", name=kind, n_gen=tokens, users=n))
    return found


def cells_of(
    models: Sequence[str],
    tests: Sequence[BenchWorkload],
    chosen: Settings,
    library: Library,
    *,
    drafters: Sequence[str] = (),
    draft_models: Sequence[str] = (),
    **varied: Sequence[str],
) -> list[BenchCell]:
    """Return all cells, those of one setup together. Where something drafts there is a plain cell as well.

    Without `models` the one used last is measured, without `drafters` (`draft:4` has a depth) off and auto. `varied`
    are lists by the names of `VARIED`; the rest is as in the settings and tuned. Raises UsageError: values that are not
    valid, or do not go together; as `Library.resolve` and `choose_draft`."""
    plain: list[tuple[DrafterChoice, int]] = [(OFF, 0)]
    drafting = [_drafters(text) for text in drafters or (OFF, "auto")]
    files = dict.fromkeys(library.resolve(spec) for spec in models or [last_here(chosen.model.last) or "demo"])
    found = dict.fromkeys(setup for file in files for setup in setups_of(file, chosen, **varied))
    possible = [one for one in found if one.flash_attn != "off" or one.cache_type_v in UNQUANTIZED]
    if not possible:
        raise UsageError("A quantized V cache needs flash attention, which is off.", "Use --kv-types q8_0/f16.")
    has_prompts = any(one.kind == "prompts" for one in tests)
    loads = {name for name, _ in drafting if name in ("auto", "draft") and has_prompts}
    cells: dict[BenchCell, None] = {}
    for setup in possible:
        for draft in _drafts(draft_models, chosen, library, setup, is_needed="draft" in loads) if loads else [""]:
            loaded = msgspec.structs.replace(setup, draft=draft)
            for test in tests:
                several = test.kind == "prompts" and any(name != OFF for name, _ in drafting)
                for name, depth in [*plain, *drafting] if several else plain:
                    cells[BenchCell(setup=loaded, test=test, drafters=name, draft_depth=depth)] = None
    return list(cells)


def check_placements(cells: Iterable[BenchCell], chosen: Settings) -> None:
    """Raises UsageError for threads, cores or memory policies that this machine does not have."""
    topology = read_topology()
    for setup in dict.fromkeys(cell.setup for cell in cells):
        spec = dataclasses.replace(PlacementSpec.of(setup.settings(chosen)), is_saved=False)
        place(topology, spec)


def setups_of(file: Path, chosen: Settings, **varied: Sequence[str]) -> list[Setup]:
    """Return the setups of one model; what tuning found for it is used where `varied` names nothing that belongs to it.
    Raises UsageError: a value is not valid; the message names its option."""
    tuned = with_tuned(file, chosen)
    keys = {f"engine.{key}" for name in varied for key in VARIED[name]}
    given = [key for group in (("engine.threads", "engine.cores", "engine.memory_policy"), *GROUPS) if keys & {*group}
             for key in group if key.startswith("engine.")]  # fmt: skip
    base = with_changes(tuned, {"engine": {key.partition(".")[2]: value_of(chosen, key) for key in given}})
    fields = {
        name: value_of(base, f"engine.{name}") for name in Setup.__struct_fields__ if f"engine.{name}" in DECLARED
    }
    if (tuned.engine.n_batch, tuned.engine.n_ubatch) == (chosen.engine.n_batch, chosen.engine.n_ubatch):
        fields |= {"batch": 0, "ubatch": 0}
    found: list[Setup] = []
    for values in itertools.product(*varied.values()):
        for name, value in zip(varied, values, strict=True):
            parts = value.split("/") if len(VARIED[name]) > 1 else [value]
            fields |= {key: parts[min(n, len(parts) - 1)] for n, key in enumerate(VARIED[name])}
        try:
            found.append(msgspec.convert({"model": str(file), **fields}, prepared(Setup), strict=False))
        except msgspec.ValidationError as error:
            key, _ = explained(error)
            option = next((name for name, keys in VARIED.items() if key in keys), key).replace("_", "-")
            raise UsageError(
                f"--{option}: must be {DECLARED[f'engine.{key}'].wanted}.", "See cpuchat bench --help."
            ) from None
    return found


def _drafters(text: str) -> tuple[DrafterChoice, int]:
    """Parse `auto`, `draft:4`. Raises UsageError."""
    name, colon, depth = text.partition(":")
    valid = not colon or (depth.isdecimal() and 1 <= int(depth) <= _MAX_DEPTH and name != OFF)
    if name not in CHOICES or not valid:
        raise UsageError(
            f"drafters: {text!r} is not one of {', '.join(CHOICES)}.",
            f"A fixed draft depth is given after a colon, 1 to {_MAX_DEPTH}: draft:4.",
        )
    return name, int(depth or 0)


def _drafts(
    draft_models: Sequence[str], chosen: Settings, library: Library, setup: Setup, *, is_needed: bool
) -> list[str]:
    """Return the draft models to measure with this setup, "" for none. Raises as `choose_draft`."""
    found: list[str] = []
    for wanted in draft_models or [chosen.speculation.draft_model]:
        path, _ = choose_draft(Path(setup.model), wanted, library, strict=bool(draft_models))
        if path is None and is_needed:
            raise UsageError(
                f"There is no draft model for {known_as(Path(setup.model))}.", "Choose one with --draft-models."
            )
        found.append(str(path) if path is not None else "")
    return list(dict.fromkeys(found))
