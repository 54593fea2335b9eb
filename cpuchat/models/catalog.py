"""The catalog: recommended chat models, where their GGUF files are, and which of them draft for which.

`catalog.toml` beside this file comes with the program; `catalog.toml` in the config folder has the user's own entries
in the same format, which replace those of the same id. Sizes and contexts help to choose; the authoritative values are
in the file's header (`gguf`, `hub`).

Also here: which entry a file is, which entries suit a machine, and the sampling options that a model's publisher
recommends (header keys are gguf-py's `general.sampling.*`, as llama.cpp reads them; else those of the catalog).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from cpuchat.base import paths, toml
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, SettingsError
from cpuchat.config.settings import SamplingSection, Settings, explained, with_changes
from cpuchat.measure.difference import MATTERS
from cpuchat.models.file_names import PREFERRED, rank
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.library.places import LocalModel, is_demo, only_drafts
from cpuchat.models.machine import Machine
from cpuchat.models.prediction import Prediction, estimate

_SAME_SIZE = 0.3
"""Share by which the parameter counts of two models of one name may differ: some files contain the embedding table
once, some twice."""

_WHY_NO_DRAFT = {
    "small": "small: drafts for larger models",
    "experts": "mixture of experts: verifying several tokens reads more experts, so drafting rarely pays",
    "recurrent": "the small models with its vocabulary are recurrent, which cpuchat does not use as drafts",
    "vocabulary": "no small model shares its vocabulary",
    "size": "no compatible model is small enough",
}
NoDraft = Literal["", "small", "experts", "recurrent", "vocabulary", "size"]
Text = Annotated[str, msgspec.Meta(max_length=400)]
Repo = Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+/[\w.-]+\Z", max_length=200)]
Id = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9.-]*\Z", max_length=80)]
Billions = Annotated[float, msgspec.Meta(gt=0, le=100_000)]
GB = Annotated[float, msgspec.Meta(gt=0, le=100_000)]


class CatalogModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model. `params` and `active_params` in billions; the latter is 0 when every token uses all of them.

    `context` in tokens, as trained. `repos` hold its GGUF files, the first one those of `sizes` (GB of 1e9 bytes by
    quantization), of which `file` is the one to offer ("": the usual one). `vocabulary` names the tokenizer: models
    with another one cannot draft. `drafts` are ids of models that can draft for this one, the best first; `no_draft` is
    why there are none, with details in `no_draft_detail`. `head_repo` has files that contain an MTP head. `use` is the
    purpose; a "draft" is not to chat with. `sampling` is what its publisher recommends. `verified` lists the facts
    confirmed by public listings and reports: "repo" (the first one), "params", "context", "drafts", and quantizations
    for their sizes; all others are unconfirmed or computed."""

    id: Id
    name: Text
    family: Text
    publisher: Text = ""
    year: Annotated[int, msgspec.Meta(ge=2018, le=2100)] = 2026
    params: Billions
    active_params: Annotated[float, msgspec.Meta(ge=0, le=100_000)] = 0.0
    context: Annotated[int, msgspec.Meta(ge=0)] = 0
    vocabulary: Text = ""
    repos: Annotated[tuple[Repo, ...], msgspec.Meta(min_length=1)]
    sizes: dict[str, GB] = {}
    file: Text = ""
    drafts: tuple[Id, ...] = ()
    no_draft: NoDraft = ""
    no_draft_detail: Text = ""
    head_repo: Text = ""
    license: Text = ""
    use: Literal["chat", "code", "reasoning", "draft"] = "chat"
    sampling: SamplingSection = msgspec.field(default_factory=SamplingSection)
    note: Text = ""
    verified: tuple[Text, ...] = ()

    @property
    def is_moe(self) -> bool:
        """Return whether it is a mixture of experts: a token uses only some of the weights."""
        return 0 < self.active_params < self.params

    @property
    def active_share(self) -> float:
        """Share of the weights that one token uses."""
        return self.active_params / self.params if self.is_moe else 1.0

    @property
    def why_no_draft(self) -> str:
        """Return why no model drafts for this one, as a clause; "" when some do or it is not known."""
        return self.no_draft_detail or _WHY_NO_DRAFT.get(self.no_draft, "")

    @property
    def quantization(self) -> str:
        """Return the quantization to offer; "" when no size is known."""
        if self.file in self.sizes:
            return self.file
        return next((name for name in PREFERRED if name in self.sizes), next(iter(self.sizes), ""))

    @property
    def size(self) -> int:
        """Return bytes of the file of `quantization`; 0 when not known."""
        return round(self.sizes.get(self.quantization, 0.0) * 1e9)

    @property
    def spec(self) -> str:
        """Return the argument for `models download`: `owner/name:Q4_K_M`."""
        return f"{self.repos[0]}:{self.quantization}" if self.quantization else self.repos[0]


class Catalog(msgspec.Struct, frozen=True):
    """Models in file order, the user's first. `problems`: one sentence for each entry that could not be used."""

    models: tuple[CatalogModel, ...]
    problems: tuple[str, ...] = ()

    def on(self, machine: Machine) -> Catalog:
        """Return the catalog with a better quantization of a model than the usual one where that is as fast on this
        machine, as its kernels were measured, and fits well."""
        return Catalog(tuple(_better(one, machine) for one in self.models), self.problems) if machine.probed else self

    def find(self, wanted: str) -> CatalogModel | None:
        """Return the model with that id."""
        return next((model for model in self.models if model.id == wanted), None)

    def download_command(self, wanted: str) -> str:
        """Return how to download what is `wanted`, also as `qwen3:8b` or `qwen3-8b:q8_0`; "" for what is not in it."""
        name, _, quant = wanted.lower().replace("@", ":").rpartition(":")
        known = next(filter(None, map(self.find, (wanted.lower(), name, f"{name}-{quant}"))), None)
        return f"cpuchat models download {known.id}{f':{quant}' if known.id == name else ''}" if known else ""

    def drafts_of(self, model: CatalogModel) -> list[CatalogModel]:
        """Return the models that can draft for it, the best first."""
        return [draft for wanted in model.drafts if (draft := self.find(wanted)) is not None]

    def search(self, words: str) -> list[CatalogModel]:
        """Return the models that match every word in name, family, publisher or a repository."""

        def matches(model: CatalogModel) -> bool:
            text = " ".join((model.id, model.name, model.family, model.publisher, *model.repos)).lower()
            return all(word in text for word in words.lower().split())

        return [model for model in self.models if matches(model)]


def load_catalog() -> Catalog:
    """Read both catalogs, unless they are as they were; the user's is `catalog.toml` in the config folder, and need not
    exist. Never fails: invalid entries are left out and listed in `problems`."""
    file = paths.user_catalog()
    try:
        found = file.stat()
        state = found.st_ino, found.st_size, found.st_mtime_ns
    except OSError:
        state = None
    return _load(file, state)


@lru_cache(maxsize=2)
def _load(file: Path, state: object) -> Catalog:
    theirs, problems = _read(file) if state is not None else ({}, [])
    ours, _ = _read(Path(__file__).with_name("catalog.toml"))
    return Catalog(tuple((theirs | ours | theirs).values()), tuple(problems))  # the user's first, and in place of ours


def _read(file: Path) -> tuple[dict[str, CatalogModel], list[str]]:
    """Return the models of one file by id, and what is wrong with the others."""
    found: dict[str, CatalogModel] = {}
    problems: list[str] = []
    where = paths.shown(file)
    try:
        tables = toml.parse(toml.read(file), where)
    except SettingsError as error:
        return {}, [error.message]
    entries = tables.get("model", [])
    if tables.keys() - {"model"} or not isinstance(entries, list):
        return {}, [f"{where}: a catalog has only [[model]], with double brackets."]
    for number, entry in enumerate(entries, 1):
        try:
            model = msgspec.convert(entry, prepared(CatalogModel))
        except msgspec.ValidationError as error:
            key, reason = explained(error)
            named = f" ({entry['id']})" if isinstance(entry, dict) and isinstance(entry.get("id"), str) else ""
            problems.append(f"{where}, model {number}{named}, {key or 'entry'}: {reason}.")
        else:
            found.setdefault(model.id, model)
    return found, problems


# With a preceding context length, as in names of draft models (`-32k-Q4_0`).
_QUANTIZATION = re.compile(
    r"(?:-\d+k)?[-_. ](?:i1-|ud-)?(?:[it]?q\d\w*|bf16|fp?16|f32|mxfp4\w*|i1)(?:[-_. ].*)?$", re.IGNORECASE
)
# Words that publishers add or omit without meaning another model.
_FILLER = frozenset(
    {"gguf", "meta", "google", "mistralai", "microsoft", "ibm", "nvidia", "huggingfacetb", "allenai", "liquidai",
     "thudm", "zai", "org", "ai", "hf"}
)  # fmt: skip
_LONGEST_NAME = 200  # of a model; one inside a file may have any length
_WORDS = re.compile(r"[a-z]+|\d+(?:\.\d+)?")


def match_local(catalog: Catalog, model: LocalModel | GGUFHeader) -> CatalogModel | None:
    """Return the catalog entry of a model file, by its repository or else its names; None if unknown.

    A name alone is not enough: the parameter count must match, too. Fine-tunes have other names and do not match. The
    name inside the file counts last: publishers leave that of another version there."""
    billions = model.n_params / 1e9
    possible = [entry for entry in catalog.models if abs(billions - entry.params) <= _SAME_SIZE * entry.params]
    repo = model.repo.lower() if isinstance(model, LocalModel) else ""
    for entry in possible:
        if repo in (known.lower() for known in entry.repos):
            return entry
    for name in (model.path.stem, repo.rpartition("/")[2], model.name):
        key = _key(name[:_LONGEST_NAME])
        for entry in possible:
            names = (entry.id, entry.name, *(known.rpartition("/")[2] for known in entry.repos))
            if key and key in map(_key, names):
                return entry
    return None


def n_params(model: LocalModel | GGUFHeader) -> int:
    """Return the parameters of a model file as its publisher counts them, which is once of embeddings that it contains
    twice; of one that the catalog does not know, those in the file."""
    entry = match_local(load_catalog(), model)
    return round(1e9 * entry.params) if entry is not None else model.n_params


@lru_cache(maxsize=4096)
def _key(name: str) -> frozenset[str]:
    """Return the words and numbers of a model's name that identify it, in any order and spelling."""
    plain = _QUANTIZATION.sub("", name)
    return frozenset(_WORDS.findall(plain.lower())) - _FILLER


PACE = 5.0
"""tok/s at about reading speed: 225 words per minute at three words per four tokens; people read about 240 (Brysbaert
2019, doi:10.1016/j.jml.2019.104047)."""
_PERMISSIVE = frozenset({"apache-2.0", "mit", "modified-mit"})
_RESEARCH_ONLY = frozenset({"cc-by-nc-4.0", "mrl", "qwen-research"})
_MAX_MEMORY = 0.5
"""Share of the machine's memory that a recommended model takes: the rest is for the user's other programs."""
_MAX_CHAT = 4
_FASTER, _FAST = 1.5, 4 * PACE
"""How many times less the fast model reads for a token than the first one for chats, and tok/s that are enough for
it."""
_MIN_FAST = 1.0  # billions of parameters; smaller models are for drafting


@dataclass(frozen=True)
class Ranked:
    """The catalog for one machine, each model once, the newest year first.

    `suits` is short: fits into half of the memory, keeps up with reading, is computed with vector instructions, and is
    not for research only. By purpose, as `purposes` says by id: "chat", of up to four publishers; "fast", which reads
    less; "long context", longer than that of the first; "reasoning" and "code". `unsuitable`: too large or too slow."""

    suits: tuple[CatalogModel, ...] = ()
    others: tuple[CatalogModel, ...] = ()
    unsuitable: tuple[CatalogModel, ...] = ()
    purposes: Mapping[str, str] = field(default_factory=dict[str, str])


def estimate_entry(model: CatalogModel, machine: Machine) -> Prediction:
    """Predict a model of the catalog in its default quantization, of which the size must be known."""
    facts: dict[str, Any] = {"params": 1e9 * model.params, "active": model.active_share, "id": model.id}
    return estimate(model.size, machine, quantization=model.quantization, **facts)


def _better(model: CatalogModel, machine: Machine) -> CatalogModel:
    if model.file or not model.size:
        return model
    least = (1 - MATTERS) * (estimate_entry(model, machine).tok_s or math.inf)
    larger = (name for name, size in model.sizes.items() if 1e9 * size > model.size)
    for name in sorted(larger, key=lambda name: -model.sizes[name]):
        one = msgspec.structs.replace(model, file=name)
        if (found := estimate_entry(one, machine)).tok_s and found.tok_s >= least and _fits_well(found):
            return one
    return model


def estimates(models: Iterable[CatalogModel], machine: Machine) -> dict[str, Prediction]:
    """Return predictions by id, from the file sizes of the default quantizations; none where that is not known."""
    return {model.id: estimate_entry(model, machine) for model in models if model.size}


def ranked(models: Iterable[CatalogModel], predictions: Mapping[str, Prediction]) -> Ranked:
    """Order the models by their predictions. `predictions`: by id; without one a model is among the `others`."""
    newest = sorted(models, key=lambda model: -model.year)
    hopeless = {id for id, one in predictions.items() if one.verdict == "too large" or one.too_slow}
    unsuitable = tuple(model for model in newest if model.id in hopeless)
    possible = [model for model in newest if _recommendable(model, predictions.get(model.id))]

    def worth(model: CatalogModel) -> tuple[int, bool, float]:
        """Newer models first, of one year those with a permissive license, then the larger one."""
        return model.year, model.license in _PERMISSIVE, model.params

    by_use = {use: [model for model in possible if model.use == use] for use in ("chat", "reasoning", "code")}
    of_publisher: dict[str, CatalogModel] = {}
    for model in by_use["chat"]:
        place = model.publisher or model.family
        of_publisher[place] = max(of_publisher.get(place, model), model, key=worth)
    chat = sorted(of_publisher.values(), key=worth, reverse=True)[:_MAX_CHAT]
    chosen = [("chat", model) for model in chat]
    if chat:
        first = chat[0]
        left = [m for m in by_use["chat"] if m not in chat and m.year == first.year and m.params >= _MIN_FAST]
        reads = {model.id: predictions[model.id].bytes_per_token for model in (first, *left)}
        quick = sorted((m for m in left if _FASTER * reads[m.id] <= reads[first.id]), key=lambda m: reads[m.id])
        enough = [m for m in quick if (predictions[m.id].low_tok_s or 0) >= _FAST]
        fast = max(enough, key=worth) if enough else next(iter(quick), None)
        long = [m for m in left if m is not fast and m.context > max(one.context for one in chat)]
        longest = max(long, key=lambda model: (model.context, worth(model)), default=None)
        chosen += [(purpose, one) for purpose, one in (("fast", fast), ("long context", longest)) if one is not None]
    chosen += [(use, max(by_use[use], key=worth)) for use in ("reasoning", "code") if by_use[use]]
    purposes = {model.id: purpose for purpose, model in chosen}
    listed = {*purposes, *(model.id for model in unsuitable)}
    others = tuple(model for model in newest if model.id not in listed)
    return Ranked(tuple(model for _, model in chosen), others, unsuitable, purposes)


def best_local(models: Iterable[tuple[LocalModel, Prediction]]) -> LocalModel | None:
    """Return the model of the user to open first: of those that fit, the one used last; else the largest that keeps up
    with reading, or the fastest where none does, in its usual quantization. None: none can be used."""

    def order(model: LocalModel, found: Prediction) -> tuple[object, ...]:
        speed = model.measured_tok_s or found.tok_s or 0.0
        size = -model.n_params if speed >= PACE else 0
        usable = found.verdict == "fits", not found.scalar_type, model.has_template
        return *(not one for one in usable), -model.last_used, size or -speed, rank(model.quantization), model.path

    here = [
        (order(model, found), model)
        for model, found in models
        if not model.damaged and model.source != "demo" and not only_drafts(model)
        and found.needed <= found.available and not found.too_slow
    ]  # fmt: skip
    return min(here, key=lambda one: one[0])[1] if here else None


def _recommendable(model: CatalogModel, prediction: Prediction | None) -> bool:
    return (
        prediction is not None
        and model.use != "draft"
        and not prediction.scalar_type
        and model.license not in _RESEARCH_ONLY
        and "repo" in model.verified
        and _fits_well(prediction)
        and (prediction.low_tok_s or 0) >= PACE
    )


def _fits_well(prediction: Prediction) -> bool:
    return prediction.verdict == "fits" and prediction.needed <= _MAX_MEMORY * prediction.total_memory


_KEYS: Final = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repeat_penalty", "penalty_last_n": "repeat_last_n",
}  # fmt: skip
_DEMO: Final = {"temperature": 0.0}
"""A model this small loses its thread with any other word than the likeliest."""


class Recommended(msgspec.Struct, frozen=True, kw_only=True):
    """Recommended options by the names of `SamplingSection`, and where they were found ("": nowhere)."""

    sampling: dict[str, Any] = {}
    source: Literal["", "header", "catalog", "demo"] = ""

    def applied_to(self, chosen: Settings) -> Settings:
        """Return a copy of `chosen` in which these options replace those that are not set."""
        unset = {name: value for name, value in self.sampling.items() if getattr(chosen.sampling, name) is None}
        return with_changes(chosen, {"sampling": unset}) if unset else chosen


NO_RECOMMENDATION: Final = Recommended()


def recommended(model: Path) -> Recommended:
    """Return what is recommended for a model file; nothing for one that cannot be read. Reads header and catalog."""
    if is_demo(model):
        return Recommended(sampling=_DEMO, source="demo")
    try:
        header = read_model(model)
    except (CpuchatError, OSError):
        return NO_RECOMMENDATION
    found: dict[str, float] = {}
    for key, name in _KEYS.items():
        value = header.metadata.get(f"general.sampling.{key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if isinstance(value, float):
            value = float(f"{value:.6g}")  # 0.6 and not 0.6000000238418579: stored with 32 bits
        elif name == "top_k":
            value = max(value, 0)  # llama.cpp: zero or less is off
        with contextlib.suppress(msgspec.ValidationError):
            found |= _given(msgspec.convert({name: value}, prepared(SamplingSection)))
    if found:
        return Recommended(sampling=found, source="header")
    entry = match_local(load_catalog(), header)
    found = _given(entry.sampling) if entry is not None else {}
    return Recommended(sampling=found, source="catalog") if found else NO_RECOMMENDATION


def _given(options: SamplingSection) -> dict[str, Any]:
    values = msgspec.structs.asdict(options)
    return {name: value for name, value in values.items() if name != "seed" and value is not None}
