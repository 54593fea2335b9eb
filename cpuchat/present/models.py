"""Models in words: headers, models of a repository, draft models, quantization types, predicted fit and speed.

Rows of lists, and details as labels and texts, the most important first. Names from Hugging Face are cleaned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.base import paths
from cpuchat.base.errors import AccessDenied, CpuchatError, ModelUnsupported
from cpuchat.base.text import clean_line, cut
from cpuchat.costs.model import N_PAST
from cpuchat.models.catalog import CatalogModel, n_params
from cpuchat.models.downloads.state import Download
from cpuchat.models.drafts.candidates import DraftCandidate, Expectation, OwnHead
from cpuchat.models.file_names import PREFERRED
from cpuchat.models.fit import lazy_bytes
from cpuchat.models.gguf.header import GGUFHeader, known_as
from cpuchat.models.heads import SERVER_RECIPE, TITLES, kind_named, title, unusable
from cpuchat.models.hub.repository import RepoModel, Repository
from cpuchat.models.inspect import Inspection
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import LocalModel
from cpuchat.models.machine import Machine, TunedMachine
from cpuchat.models.prediction import Prediction
from cpuchat.models.quantize.types import Forecast, QuantType, SpeedHere, speed_here
from cpuchat.models.traffic import model_work
from cpuchat.present import downloads
from cpuchat.present.table import WHY, ListRow
from cpuchat.telemetry import units
from cpuchat.telemetry.machine import ROUGH_WORDS
from cpuchat.telemetry.roofline import NO_LIMIT
from cpuchat.telemetry.units import about, plural, size, tokens

if TYPE_CHECKING:
    from cpuchat.models.drafts.choice import PlannedDraft


Rows = list[tuple[str, str]]
_MAX_LABEL, _MAX_TEXT = 60, 400  # characters: a file can hold texts of any length


def sections(model: Inspection, *, settings: bool = True) -> list[tuple[str, Rows]]:
    """Return (heading, [(label, value)]) of everything but the templates' texts, shortened and cleaned.

    Labels may be "". Without `settings` the list of all metadata is left out."""
    writes = model.kind == "model"
    found: list[tuple[str, Rows]] = [
        ("Problems", [("", f"{model.problem[:1].upper()}{model.problem[1:]}.")] if model.problem else []),
        ("Model", _model(model) if writes else _other(model)),
        ("Memory", _memory(model) if writes else []),
        ("Tensors", _tensors(model)),
        ("Tokenizer", _tokenizer(model) if writes or model.tokenizer else []),
        ("Chat template", _templates(model) if writes or model.templates else []),
        ("Origin", [("base model", ", ".join(model.base_models)), ("license", model.license)]),
        ("Metadata", list(model.settings) if settings else []),
    ]

    def shown(rows: Rows) -> Rows:
        return [(clean_line(cut(label, _MAX_LABEL)), clean_line(cut(text, _MAX_TEXT))) for label, text in rows if text]

    return [(heading, rows) for heading, all_rows in found if (rows := shown(all_rows))]


def _model(model: Inspection) -> Rows:
    header, counted = model.header, n_params(model.header)
    twice = f", {units.parameters(header.n_params)} with the output matrix, a copy of its embeddings"
    copied = header.output_matrix == "output.weight" and header.n_params > counted + header.n_vocab * header.n_embd / 2
    parts = f", {header.split_count} parts" if header.split_count > 1 else ""
    active = f", {units.parameters(header.n_params_active)} active" if header.n_params_active < header.n_params else ""
    heads = f"{header.n_head} query, {model.heads_kv} KV, head size {header.key_length}" if header.n_head else ""
    layers = f"{model.windowed_layers} of {plural(model.header.n_layer, 'layer')}"
    experts = ""
    if model.experts is not None:
        shared = f" and {model.experts.shared} shared" if model.experts.shared else ""
        experts = f"{model.experts.used} of {model.experts.count}{shared} per token"
    return [
        ("name", header.name),
        ("architecture", header.architecture),
        ("parameters", units.parameters(counted) + active + twice * copied),
        ("quantization", f"{header.quantization}, {header.bits_per_weight:.2f} bits per weight"),
        ("trained context", plural(header.n_ctx_train, "token") if header.n_ctx_train else ""),
        ("layers", f"{header.n_layer}, embedding {header.n_embd:,}, feed-forward {header.n_ff:,}"),
        ("attention heads", heads),
        ("sliding window", f"{plural(model.window, 'token')} in {layers}" if model.window else ""),
        ("experts", experts),
        ("file", f"{paths.shown(header.path)}, GGUF version {header.version}{parts}"),
    ]


def _other(model: Inspection) -> Rows:
    header = model.header
    return [
        ("name", header.name),
        ("kind", model.kind),
        ("architecture", header.architecture),
        ("parameters", units.parameters(header.n_params) if header.n_params else ""),
        ("size", units.size(header.file_size)),
    ]


def _memory(model: Inspection) -> Rows:
    lazy = lazy_bytes(model.header) if model.tables else 0
    on_disk = f"; {units.size(lazy)} of them stay on disk and count as no memory" if lazy else ""
    tables = f"{units.size(model.tables)}, of which a token reads single rows{on_disk}"
    return [
        ("size", f"{units.size(model.header.file_size)}, tensors {units.size(model.header.size)}"),
        ("read per token", f"{units.size(model.bytes_per_token)} behind {N_PAST} tokens of context"),
        ("lookup tables", tables if model.tables else ""),
        ("KV cache", kv_growth(model.kv_per_token, model.kv_windowed, " as F16")),
        ("recurrent state", f"{units.size(model.state)}, independent of the context" if model.state else ""),
    ]


def kv_growth(per_token: int, windowed: int, kind: str = "") -> str:
    """Format what a KV cache takes, in bytes: `82 kB per token of context as F16 + 654 MB for sliding windows`."""
    parts = [f"{units.size(per_token)} per token of context{kind}" if per_token else ""]
    parts.append(f"{units.size(windowed)} for sliding windows" if windowed else "")
    return " + ".join(filter(None, parts))


def _tensors(model: Inspection) -> Rows:
    return [
        (kind.type, f"{plural(kind.count, 'tensor')}, {units.parameters(kind.n_params)} parameters of "
         f"{8 * kind.nbytes / max(kind.n_params, 1):.4g} bits, {units.size(kind.nbytes)} "
         f"({100 * kind.nbytes / max(model.header.size, 1):.1f} %)"
         f"{', no SIMD kernel on this CPU' if kind.type in model.scalar_types else ''}")
        for kind in model.tensors
    ]  # fmt: skip


def _tokenizer(model: Inspection) -> Rows:
    found = model.tokenizer
    if found is None:
        return [("", "none")]
    added = [name for name, adds in (("BOS", found.add_bos), ("EOS", found.add_eos)) if adds]
    return [
        ("kind", ", ".join(filter(None, (found.kind, found.model, found.pre)))),
        ("tokens", f"{found.n_tokens:,}" + (f", {found.n_merges:,} merges" if found.n_merges else "")),
        ("added tokens", " and ".join(added) or "none"),
    ]


def _templates(model: Inspection) -> Rows:
    if not model.templates:
        return [("", "none (base model: continues text instead of answering)")]
    return [
        (template.name or "default",
         f"{plural(len(template.text), 'character')}, supports {', '.join(template.features) or 'user messages only'}")
        for template in model.templates
    ]  # fmt: skip


AUTO, NONE, MORE = "auto", "none", "more"
"""Keys of the rows that are no model: the draft model that belongs to the target, no draft model at all, and what is
folded."""

_OTHERS = {
    AUTO: ("Automatic", "the catalog's draft model, if it is downloaded"),
    NONE: ("No draft model", "only suffix decoding, which needs none"),
    MORE: ("", "candidates that make this model no faster, or have another vocabulary"),
}


def draft_rows(
    candidates: dict[str, DraftCandidate], loaded: str, wanted: str, *, folds: bool = False
) -> list[ListRow]:
    """Return all rows. `candidates` and `loaded`, the draft model ("" = none), by key; `wanted` is the setting: AUTO,
    NONE or else. `folds`: candidates that do not help are only counted, in the row of the key `MORE`."""
    lines = [ListRow(name="candidates")] if candidates else []
    names = Counter((candidate.name, candidate.quantization) for candidate in candidates.values())
    unfit = {key for key, one in candidates.items() if one.fits is False}
    no_gain = {key for key, one in candidates.items() if one.expected.gains and not one.expected.pays} - unfit
    folded = (unfit | no_gain) - {loaded, wanted} if folds else set[str]()
    for key, candidate in candidates.items():
        if key in folded:
            continue
        line = _row(key, candidate, is_loaded=key == loaded)
        if candidate.path is not None and names[candidate.name, candidate.quantization] > 1:
            line = replace(line, name=known_as(candidate.path))  # another one has the same name
        lines.append(line)
    if folded:
        counts = (f"{len(no_gain)} without gain here" if no_gain else "", f"{len(unfit)} incompatible" if unfit else "")
        lines.append(ListRow(MORE, "▸", ", ".join(filter(None, counts)), note="Enter shows them", dim=True))
    lines.append(ListRow(name="other options"))
    for key in (AUTO, NONE):
        chosen, (name, note) = key == wanted, _OTHERS[key]
        lines.append(ListRow(key, "●" if chosen else "→", name, note=note, strong=chosen))
    return lines


def _row(key: str, candidate: DraftCandidate, *, is_loaded: bool) -> ListRow:
    mark = "●" if is_loaded else "○" if candidate.where == "here" else "◌"
    state = (
        "unknown" if candidate.failed else {None: "checking…", True: "compatible", False: "mismatch"}[candidate.fits]
    )
    state = "same model" if candidate.same_model and candidate.fits else state
    gain = "" if candidate.fits is False else _gains(candidate.expected)
    gain = TITLES[candidate.head] if candidate.head else gain
    columns = (candidate.quantization, size(candidate.size) if candidate.size else "", state, gain)
    return ListRow(
        key, mark, candidate.name, columns, strong=is_loaded, dim=candidate.fits is False or bool(candidate.failed)
    )


def _gains(expected: Expectation) -> str:
    """`≈ 1.1–1.4×`, `no gain`, `no SIMD`; "" when unknown."""
    if not expected.gains:
        return "no SIMD" if expected.scalar_type else ""
    speedups = [gain.speedup for gain in expected.gains]
    if not any(gain.depth for gain in expected.gains):
        return "no gain"
    low, high = f"{min(speedups):.1f}", f"{max(speedups):.1f}"
    return f"≈ {low}×" if low == high else f"≈ {low}–{high}×"


def head_words(head: OwnHead | None) -> str:
    """Describe the head that a model contains: `MTP, 260 MB, KV cache 4.1 kB per token of context; ≈ 1.3× in prose,
    ≈ 1.9× in code, at the usual acceptance of 70 to 90 %`; "" without one."""
    if head is None:
        return ""
    sizes, gains = f"MTP, {units.size(head.size.weights)}, KV cache {kv_growth(head.size.kv, 0)}", head.expected.gains
    if head.problem:
        return f"{sizes}; {head.problem}. {SERVER_RECIPE}"
    measured = next((gain for gain in gains if gain.kind == "measured"), None)
    if measured is not None or not any(gain.depth for gain in gains):
        return f"{sizes}; {measured.words if measured is not None else head.expected.words}"
    rates = [100 * gain.acceptance for gain in gains]
    return f"{sizes}; {head.expected.words}, at the usual acceptance of {min(rates):.0f} to {max(rates):.0f} %"


def draft_details(key: str, candidate: DraftCandidate | None, *, is_loaded: bool) -> Rows:
    """Label and text, cleaned."""
    if candidate is None:
        return [("effect", _OTHERS[key][1])]
    place = "loaded as draft model" if is_loaded else "downloaded" if candidate.where == "here" else "on Hugging Face"
    known = "recommended by the catalog" if candidate.named else ""
    expected, usable = candidate.expected, candidate.fits is not False
    text = [
        ("gain", expected.words if usable else ""),
        (WHY, expected.why if expected.gains and usable else ""),
        ("head", title(candidate.head) if candidate.head else ""),
        ("target" if candidate.head else "vocabulary", _vocabulary(candidate)),
        ("model", "the target's own, in fewer bytes" if candidate.same_model else ""),
        ("state", " · ".join(filter(None, (place, known, candidate.repo)))),
        ("path", paths.shown(candidate.path) if candidate.path is not None else ""),
    ]
    return [(label, clean_line(words)) for label, words in text if words]


def _vocabulary(candidate: DraftCandidate) -> str:
    if candidate.failed:
        return f"unknown: {candidate.failed}"
    if candidate.verdict is None:
        return "comparing…"
    if not candidate.verdict.ok:
        return f"incompatible: {candidate.verdict.reason}"
    return f"compatible. {candidate.verdict.note}" if candidate.verdict.note else "compatible"


def purpose(model: CatalogModel) -> str:
    """Return the purpose of a catalog model."""
    return {"reasoning": "reasoning at length", "draft": "draft model, not for chat"}.get(model.use, model.use)


def verdict(prediction: Prediction | None) -> str:
    """Return `fits`, `tight`, `not free` now, `too large`, or `too slow` to be of use, `no SIMD` where it would be
    computed without vector instructions; "" when unknown."""
    if prediction is None:
        return ""
    if prediction.scalar_type and prediction.verdict != "too large":
        return "no SIMD"
    return "too slow" if prediction.too_slow else prediction.verdict


def fit(prediction: Prediction) -> str:
    """Return the verdict; `≈ fits` where only the file size is known."""
    return verdict(prediction) if prediction.exact else f"≈ {verdict(prediction)}"


def predicted_speed(prediction: Prediction | None) -> str:
    """`≈41 tok/s`, `≈7.3 tok/s`; "" when unknown."""
    return f"≈{about(prediction.tok_s)} tok/s" if prediction is not None and prediction.tok_s is not None else ""


def measured_speed(plain: float, drafted: float) -> str:
    """`29.4 tok/s, 41.0 with drafts (measured)`; "" where nothing was measured (0)."""
    more = f", {units.rate(drafted)} with drafts" if drafted else ""
    return f"{units.rate(plain)} tok/s{more} (measured)" if plain else ""


def decision_rows(prediction: Prediction | None, use: str = "", plain: float = 0.0, drafted: float = 0.0) -> Rows:
    """Return whether to take a model, in one line: fit, speed and use; and why, in another. `plain` and `drafted`: the
    tok/s measured in chats, 0 where they were not."""
    if prediction is None:
        return []
    shown = prediction.outcome if prediction.verdict == verdict(prediction) else verdict(prediction)
    speed = measured_speed(plain, drafted) or predicted_speed(prediction)
    why = f"{prediction.needed_of_free}: {prediction.need.breakdown(prediction.draft_need)}"
    if prediction.cost is not None and not plain:
        reads, cost = prediction.bytes_per_token, prediction.cost
        why += f" · {units.size(reads)} per token at {units.bandwidth(reads / cost.read)} GB/s; "
        why += units.takes("memory", cost.read / cost.seconds)
    elif not plain and prediction.verdict != "too large":
        why += f" · no speed: {prediction.basis}"
    return [("fit", " · ".join(filter(None, (shown, speed, use)))), (WHY, why)]


def speed_rows(prediction: Prediction, machine: Machine) -> Rows:
    """Return the speed predicted for a machine and the limit there, each with what it is based on."""
    speed = f"{predicted_speed(prediction) or 'n/a'}: {prediction.basis.removeprefix('≈ ')}"
    rows, limit = [("speed", speed)], prediction.limit_tok_s
    if limit is None and prediction.tok_s is not None:
        rows.append(("limit", NO_LIMIT))
    elif limit is not None:
        n_bytes = prediction.bytes_per_token  # with so many digits that the quotient is the limit beside it
        per_token = f"{units.gigabytes(n_bytes)} GB" if n_bytes >= 999.5e6 else units.size(n_bytes)
        about, more = "≈" * machine.estimated, " or more" * machine.at_least
        shown = f"{about}{units.rate(limit)} tok/s{more} without drafts"
        rows.append(("limit", f"{shown}: {about}{units.gigabytes(limit * n_bytes)} GB/s ÷ {per_token} per token"))
    return rows


def context(prediction: Prediction) -> str:
    """`8k tokens (up to 32k fit)`; "" when unknown."""
    n_ctx, more = prediction.need.n_ctx, prediction.context_that_fits
    if not n_ctx or not prediction.exact:
        return ""
    return f"{tokens(n_ctx)} tokens" + (f" (up to {tokens(more)} fit)" if more > n_ctx else "")


def doubt(machine: Machine | None, *, in_app: bool = False) -> str:
    """Return why predicted speeds are missing or rough, and what measures them: the app, which does so by itself, or a
    command; "" where passes were measured."""
    if machine is None or machine.probed:
        return ""
    if machine.profile is None:
        return f"no speeds: {machine.peak_source}"
    if machine.rough and machine.at_least:  # as all figures say of this bandwidth
        return f"speeds may be higher: {'measured again' if in_app else '`cpuchat probe`'} when idle"
    rough = ROUGH_WORDS if machine.rough else "rough"
    return f"speeds are {rough} until measured{' when idle' if in_app else ': `cpuchat probe`'}"


@dataclass(frozen=True)
class RepositoryEntry:
    """One model of a repository. `path`: where it is on this machine; `arrived`: bytes of it on this machine, whatever
    became of their download.

    `prediction` is None until it is known, and for what is no language model; `draft` is counted in it. `problem`: why
    the header can't be read."""

    model: RepoModel
    path: Path | None = None
    arrived: int = 0
    loaded: bool = False
    download: Download | None = None
    prediction: Prediction | None = None
    draft: PlannedDraft | None = None
    problem: CpuchatError | None = None

    @property
    def reason_against_download(self) -> str:
        """Return why a download would certainly fail, "" when it may succeed."""
        if not self.model.complete:
            return "Parts of this model are missing in the repository. Choose another model."
        return str(self.problem) if isinstance(self.problem, AccessDenied) else ""


def heading(repository: Repository) -> str:
    """`1.2M downloads · 2025-11-03 · apache-2.0 · gated`."""
    parts = [
        f"{units.count(repository.downloads)} downloads" if repository.downloads else "",
        repository.updated,
        repository.license,
        "gated" if repository.gated else "",
        "private" if repository.private else "",
    ]
    return " · ".join(clean_line(part) for part in parts if part)


def repository_rows(models: Sequence[RepositoryEntry]) -> list[ListRow]:
    """Return the rows: language models first, then heads and multimodal projectors under a heading."""
    chat = [repository_row(entry) for entry in models if entry.model.kind == "model"]
    other = [repository_row(entry) for entry in models if entry.model.kind != "model"]
    return chat + ([ListRow(name="Draft heads and multimodal projectors (not models)"), *other] if other else [])


def repository_row(entry: RepositoryEntry) -> ListRow:
    """`◌ Qwen2.5-7B-Instruct  Q4_K_M  4.7 GB  fits  ≈10 tok/s`."""
    model, download, predicted = entry.model, entry.download, entry.prediction
    mark, state = "◌", "" if predicted is None else fit(predicted)
    if not model.complete:
        mark, state = "!", "incomplete"
    elif isinstance(entry.problem, AccessDenied | ModelUnsupported):
        state = "no access" if isinstance(entry.problem, AccessDenied) else "unsupported"
    if entry.path is not None:
        mark, state = ("●", "loaded") if entry.loaded else ("○", "downloaded")
    elif download is not None:
        mark = downloads.download_mark(download)
        state = {"paused": "paused", "failed": "failed", "queued": "queued", "checking": "verifying"}.get(
            download.state, downloads.percent(download).strip()
        )
    elif part := _part(entry):
        state = f"paused {part}"
    speed = "" if entry.loaded else predicted_speed(predicted)
    columns = (model.quantization or "–", units.size(model.size), state, speed)
    return ListRow(entry.model.key, mark, downloads.name(model), columns, strong=entry.loaded,
                   dim=entry.path is None and download is None)  # fmt: skip


def repository_details(entry: RepositoryEntry, repository: Repository) -> list[tuple[str, str]]:
    """Return labels and texts, the most important first: a small screen cuts off the end."""
    model, predicted, download = entry.model, entry.prediction, entry.download
    parts = f" in {units.plural(len(model.files), 'part')}" if len(model.files) > 1 else ""
    lines = [
        ("problem", clean_line(str(entry.problem)) if entry.problem is not None else ""),
        ("problem", downloads.problem(download) if download is not None else ""),
        *decision_rows(predicted),
        ("context", context(predicted) if predicted is not None else ""),
        ("draft", _draft(entry)),
        ("size", units.size(model.size) + parts),
        ("head", _head(entry)),
        ("state", _arrived(entry)),
        ("file", clean_line(entry.model.key)),
        ("base model", clean_line(repository.base_model)),
        ("path", clean_line(paths.shown(entry.path)) if entry.path is not None else ""),
    ]
    return [(label, text) for label, text in lines if text]


def _head(entry: RepositoryEntry) -> str:
    """Return what kind of draft head it is, and what can use it; "" for other files."""
    kind = kind_named(entry.model.key)
    if kind is None:
        return ""
    reason = unusable(kind)
    return f"{TITLES[kind]}, drafts for the models of this repository" + (f"; {reason}" if reason else "")


def _draft(entry: RepositoryEntry) -> str:
    """Return which draft model is counted, and whether it is downloaded."""
    if entry.draft is None or entry.prediction is None or entry.prediction.draft_need is None:
        return ""
    return entry.draft.name + ("" if entry.draft.here else " (from the catalog, not downloaded)")


def _arrived(entry: RepositoryEntry) -> str:
    """Return what is here of a model: `61 % downloaded, 1.8 GB left`."""
    if entry.path is not None and not entry.loaded:
        return "downloaded: load its model, then F9" if entry.model.kind == "head" else "downloaded"
    part = _part(entry) if entry.download is None else ""
    return f"{part} downloaded, {units.size(entry.model.size - entry.arrived)} left" if part else ""


def _part(entry: RepositoryEntry) -> str:
    """Return `61 %` for an earlier partial download; "" for less than one hundredth."""
    share = int(100 * entry.arrived / entry.model.size) if entry.model.size else 0
    return f"{min(share, 99)} %" if share else ""


@dataclass(frozen=True)
class TypePrediction:
    """The prediction for one type: its file, fit and speed; `here` is that against the source."""

    forecast: Forecast
    prediction: Prediction
    here: SpeedHere


def predict_type(source: GGUFHeader, forecast: Forecast, machine: TunedMachine, library: Library) -> TypePrediction:
    """Predict what `forecast` gives on `machine`, beside the draft model of `source`. Takes some milliseconds: call it
    in a thread."""
    from cpuchat.models.drafts.choice import predict_load

    options = machine.settings(source.path).load_options()
    return TypePrediction(
        forecast=forecast,
        prediction=predict_load(forecast.header, machine, library)[0],
        here=speed_here(machine.of(source.path), *(model_work(one, options) for one in (forecast.header, source))),
    )


def quantize_title(model: LocalModel) -> str:
    """`Quantize Qwen2.5-1.5B-Instruct F16`."""
    known = model.quantization.lower() in model.name.lower()
    return clean_line(f"Quantize {model.name}{'' if known else f' {model.quantization}'}")


def recommended(predictions: Mapping[str, TypePrediction | str], names: Sequence[str], source_size: int) -> str:
    """Return the first of `names` from the usual trade-off on that fits and saves space; "" until known. None that
    quantizes a second time: the original is better."""
    for name in names[names.index(PREFERRED[0]) :]:
        if (outcome := predictions.get(name)) is None:
            break
        if isinstance(outcome, str) or outcome.forecast.lossy or outcome.forecast.header.file_size >= source_size:
            continue
        if verdict(outcome.prediction) == "fits":
            return name
    return ""


def here(speed: SpeedHere) -> str:
    """`1.9×` by passes of these types that were measured on this machine; `≈1.9×` predicted."""
    return f"{'' if speed.is_measured or speed.ratio == 1 else '≈'}{units.factor(speed.ratio)}"


_FAR = 0.9  # of what the bytes promise


def why_here(kind: str, speed: SpeedHere) -> str:
    """Return why a type is so fast on this machine."""
    by_bytes = units.factor(speed.by_bytes)
    if speed.ratio < _FAR * speed.by_bytes:
        return f"{kind} takes more arithmetic on this CPU ({by_bytes} by its bytes)"
    if _FAR * speed.ratio > speed.by_bytes:
        return f"the other one takes more arithmetic on this CPU ({by_bytes} by its bytes)"
    more = "fewer" if speed.by_bytes > 1 else "more"
    return f"a token reads {abs(100 - 100 / speed.by_bytes):.0f} % {more} bytes"


def quantize_row(kind: QuantType, predictions: Mapping[str, TypePrediction | str]) -> ListRow:
    """Format a line of the list. The prediction of a type that cannot be made is its problem."""
    outcome, columns = predictions.get(kind.name), ("", "", "", "")
    if isinstance(outcome, str):
        columns = ("", "", "impossible", "")
    elif outcome is not None:
        columns = ("", size(outcome.forecast.header.file_size), fit(outcome.prediction), here(outcome.here))
    return ListRow(key=kind.name, name=f"{kind.name} · {kind.about}", columns=columns, dim=isinstance(outcome, str))


def quantize_details(kind: QuantType, outcome: TypePrediction | str | None, source_size: int) -> list[tuple[str, str]]:
    """Label and text of all about one type; `outcome` as of `quantize_row`."""
    if outcome is None:
        return [("quality", kind.about), ("file", "computing…")]
    if isinstance(outcome, str):
        return [("quality", kind.about), ("problem", clean_line(outcome))]
    forecast = outcome.forecast
    smaller = source_size / max(forecast.header.file_size, 1)
    change = f"{units.factor(smaller)} smaller" if smaller > 1 else "larger than the source"
    again = f"requantized from {', '.join(forecast.lossy)}: loses quality twice" if forecast.lossy else ""
    rows = [
        ("quality", kind.about),
        ("warning", again),
        ("file", f"{size(forecast.header.file_size)}, {change}, {forecast.header.bits_per_weight:.2f} bits per weight"),
        *decision_rows(outcome.prediction),
        ("here", f"{here(outcome.here)} as fast as the source: {why_here(kind.tensor, outcome.here)}"),
    ]
    return [(label, text) for label, text in rows if text]
