"""Expands what is measured: the product of models, quantizations, drafters, threads, cores, memory policies, KV types
and flash attention, each with every test. Prompts are code, summaries, maths and chat: they differ in how well they can
be drafted.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast, get_args

import msgspec

from cpuchat.base import toml
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import UsageError
from cpuchat.config.servers import last_here
from cpuchat.config.settings import (
    DECLARED,
    Cores,
    MemoryPolicy,
    Settings,
    SettingsSection,
    explained,
    value_of,
    with_changes,
)
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.models.drafts.choice import choose_draft
from cpuchat.models.library.library import Library
from cpuchat.models.machine import tuned_settings
from cpuchat.protocol.drafters import CHOICES, DrafterChoice
from cpuchat.protocol.options import UNQUANTIZED, CacheType, FlashAttention

Kind = Literal["code", "summary", "maths", "chat"]


class BenchPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One user message; `name` is unique."""

    kind: Kind
    name: str
    text: str


class _Prompts(msgspec.Struct, forbid_unknown_fields=True):
    prompt: list[BenchPrompt]


def load() -> list[BenchPrompt]:
    """Return the built-in prompts, each kind's together."""
    text = (importlib.resources.files("cpuchat.bench") / "prompts.toml").read_text(encoding="utf-8")
    prompts = msgspec.convert(toml.loads(text), prepared(_Prompts)).prompt
    return [msgspec.structs.replace(prompt, text=prompt.text.strip()) for prompt in prompts]


Count = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
WorkloadKind = Literal["prompts", "pp", "tg"]

KINDS: tuple[Kind, ...] = get_args(Kind)
OFF: Final = "off"
MIN_ROUNDS = 3
_MAX_DEPTH = 31
_WITH_DRAFT_MODEL = ("auto", "draft")


class BenchWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """`name` as shown: a kind of prompts, or llama-bench's `pp512`, `tg128 @ d4096`. `depth`: tokens in the KV cache
    before."""

    kind: WorkloadKind
    name: str
    n_prompt: int = 0
    n_gen: int = 0
    depth: int = 0

    @classmethod
    def of_prompts(cls, kind: Kind, tokens: int) -> BenchWorkload:
        return cls(kind="prompts", name=kind, n_gen=tokens)

    @classmethod
    def random(cls, kind: Literal["pp", "tg"], tokens: int, depth: int) -> BenchWorkload:
        name = f"{kind}{tokens}" + (f" @ d{depth}" if depth else "")
        return cls(
            kind=kind,
            name=name,
            n_prompt=tokens if kind == "pp" else 0,
            n_gen=tokens if kind == "tg" else 0,
            depth=depth,
        )


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is loaded: cells with the same are measured without loading again. `draft` "": none is loaded.

    The other fields are settings of the section engine, by their keys; `batch`, `ubatch` 0: as they are set.
    """

    model: str
    draft: str = ""
    threads: int = 0
    cores: str = "auto"
    memory_policy: str = "auto"
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
        return f"{Path(self.setup.model).stem} · {self.drafting} · {self.test.name}"

    @property
    def plain(self) -> BenchCell:
        """The cell that this one's speed-up refers to: plain decoding."""
        return msgspec.structs.replace(self, drafters=OFF, draft_depth=0)


class Matrix(SettingsSection):
    """Matrix as a user asks for it. An empty list: the value of the settings, with what tuning found for the model.

    `drafters` are names with an optional draft depth (`draft:4`); `kv_types` one type, or those of K and V
    (`q8_0/f16`). `pp` and `tg` are numbers of random tokens, measured at each `depth`; without them `prompts` are run,
    by default all kinds, `tokens` tokens each.
    """

    models: list[str] = []
    drafters: list[str] = []
    draft_models: list[str] = []
    threads: list[Count] = []
    cores: list[Cores] = []
    memory_policies: list[MemoryPolicy] = []
    kv_types: list[str] = []
    flash_attn: list[FlashAttention] = []
    prompts: list[Kind] = []
    tokens: Tokens = 128
    pp: list[Tokens] = []
    tg: list[Tokens] = []
    depth: list[Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]] = msgspec.field(default_factory=lambda: [0])
    rounds: Annotated[int, msgspec.Meta(ge=MIN_ROUNDS, le=1000)] = MIN_ROUNDS

    def tests(self) -> list[BenchWorkload]:
        """Return all tests."""
        found: list[BenchWorkload] = []
        for depth in dict.fromkeys(self.depth):
            found += [BenchWorkload.random("pp", n, depth) for n in dict.fromkeys(self.pp)]
            found += [BenchWorkload.random("tg", n, depth) for n in dict.fromkeys(self.tg)]
        kinds = self.prompts or ([] if found else KINDS)
        return [*found, *(BenchWorkload.of_prompts(kind, self.tokens) for kind in dict.fromkeys(kinds))]


def read_matrix(values: Mapping[str, Any]) -> Matrix:
    """Return what the options say. Raises UsageError: a value is not valid; the message names its option."""
    given = {key: value for key, value in values.items() if value not in (None, ())}
    try:
        return msgspec.convert(given, prepared(Matrix), strict=False)
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        name = re.sub(r"\[.*", "", key)
        if "matching regex" in reason:
            words = {"cores": "engine.cores", "memory_policies": "engine.memory_policy"}
            reason = f"must be {DECLARED[words[name]].wanted}"
        raise UsageError(f"--{name.replace('_', '-')}: {reason}.", "See cpuchat bench --help.") from None


def cells_of(matrix: Matrix, chosen: Settings, library: Library) -> list[BenchCell]:
    """Return all cells, those of one setup together. Where something drafts there is a plain cell as well. Raises
    UsageError: values that are not valid, or do not go together; ModelNotFound, DraftMismatch, ModelDamaged: as
    `Library.resolve` and `choose_draft`.
    """
    default: list[tuple[DrafterChoice, int]] = [(OFF, 0), ("auto", 0)]
    drafters = [_drafters(text) for text in matrix.drafters] or default
    tests, plain = matrix.tests(), default[:1]
    cells: dict[BenchCell, None] = {}
    for setup in _setups(matrix, chosen, library):
        for draft in _drafts(matrix, chosen, library, setup, drafters, tests):
            loaded = msgspec.structs.replace(setup, draft=draft)
            for test in tests:
                several = test.kind == "prompts" and any(name != OFF for name, _ in drafters)
                for name, depth in [*plain, *drafters] if several else plain:
                    cells[BenchCell(setup=loaded, test=test, drafters=name, draft_depth=depth)] = None
    return list(cells)


def located(cells: Iterable[BenchCell], library: Library) -> list[BenchCell]:
    """Return cells of another run, perhaps of another machine: files that are elsewhere here are found by name. Raises
    ModelNotFound: one of them is not on this machine.
    """
    found: dict[str, str] = {"": ""}

    def here(path: str) -> str:
        if path not in found:
            found[path] = path if Path(path).is_file() else str(library.resolve(Path(path).name))
        return found[path]

    def moved(setup: Setup) -> Setup:
        return msgspec.structs.replace(setup, model=here(setup.model), draft=here(setup.draft))

    return list(dict.fromkeys(msgspec.structs.replace(cell, setup=moved(cell.setup)) for cell in cells))


def check_placements(cells: Iterable[BenchCell], chosen: Settings) -> None:
    """Raises UsageError for threads, cores or memory policies that this machine does not have."""
    topology = read_topology()
    for setup in dict.fromkeys(cell.setup for cell in cells):
        spec = dataclasses.replace(PlacementSpec.of(setup.settings(chosen)), is_saved=False)
        place(topology, spec, with_draft=bool(setup.draft))


def _setups(matrix: Matrix, chosen: Settings, library: Library) -> list[Setup]:
    models = matrix.models or [last_here(chosen.model.last) or "demo"]
    files = dict.fromkeys(library.resolve(spec) for spec in models)
    found = [setup for file in files for setup in setups_of(file, matrix, chosen)]
    possible = [one for one in found if one.flash_attn != "off" or one.cache_type_v in UNQUANTIZED]
    if not possible:
        raise UsageError("A quantized V cache needs flash attention, which is off.", "Use --kv-types q8_0/f16.")
    return list(dict.fromkeys(possible))


def setups_of(file: Path, matrix: Matrix, chosen: Settings) -> list[Setup]:
    """Return the setups of one model; what tuning found for it is used where the matrix names nothing else."""
    tuned = tuned_settings(file, chosen)
    placed = (chosen if matrix.threads or matrix.cores or matrix.memory_policies else tuned).engine
    attending = (chosen if matrix.kv_types or matrix.flash_attn else tuned).engine
    now, before = ((one.engine.n_batch, one.engine.n_ubatch) for one in (tuned, chosen))
    batch, ubatch = now if now != before else (0, 0)
    flash: list[FlashAttention] = matrix.flash_attn or [attending.flash_attn]
    kv_types = [_kv_types(text) for text in matrix.kv_types] or [(attending.type_k, attending.type_v)]
    return [
        Setup(
            model=str(file), threads=threads, cores=cores, memory_policy=memory,
            cache_type_k=kv[0], cache_type_v=kv[1], flash_attn=flash_attn, batch=batch, ubatch=ubatch,
        )
        for threads, cores, memory, kv, flash_attn in itertools.product(
            matrix.threads or [placed.threads],
            matrix.cores or [placed.cores],
            matrix.memory_policies or [placed.memory_policy],
            kv_types,
            flash,
        )
    ]  # fmt: skip


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


def _kv_types(text: str) -> tuple[CacheType, CacheType]:
    """Parse `q8_0` or `q8_0/f16`. Raises UsageError."""
    k, _, v = text.partition("/")
    for one in (k, v or k):
        if one not in get_args(CacheType):
            raise UsageError(f"kv_types: {one!r} is not one of {', '.join(get_args(CacheType))}.")
    return cast(CacheType, k), cast(CacheType, v or k)


def _drafts(
    matrix: Matrix,
    chosen: Settings,
    library: Library,
    setup: Setup,
    drafters: list[tuple[DrafterChoice, int]],
    tests: list[BenchWorkload],
) -> list[str]:
    """Return the draft models to measure with this setup, "" for none. Raises as `choose_draft`."""
    names = [name for name, _ in drafters if name in _WITH_DRAFT_MODEL]
    if not names or all(test.kind != "prompts" for test in tests):
        return [""]
    found: list[str] = []
    for wanted in matrix.draft_models or [chosen.speculation.draft_model]:
        path, _ = choose_draft(Path(setup.model), wanted, library, strict=bool(matrix.draft_models))
        if path is None and "draft" in names:
            raise UsageError(
                f"There is no draft model for {Path(setup.model).name}.", "Choose one with --draft-models."
            )
        found.append(str(path) if path is not None else "")
    return list(dict.fromkeys(found))
