"""Predicts memory fit and decoding speed of models from their headers or sizes, before they are downloaded or loaded.

The speed is that of plain decoding by the cost model (`costs.model`); speculation comes on top.

The header of a model on the hub is some MB, most of it the vocabulary, which precedes the tensor list. Quantizations of
a model differ only in their weights, so one header is read, and the others are predicted from it and their sizes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cpuchat.costs.model import ALIKE, N_PAST, PassCost, bytes_read, pass_cost
from cpuchat.models.fit import (
    PROCESS_BYTES,
    MemoryNeed,
    draft_memory,
    gigabytes,
    kv_cells,
    largest_context,
    plan_memory,
)
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import BY_NAME
from cpuchat.models.library.places import LocalModel
from cpuchat.models.machine import Machine
from cpuchat.models.support import scalar_type_of, why_slow
from cpuchat.models.traffic import main_type, model_work, typical_work
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.model_info import ModelWork
from cpuchat.telemetry import units
from cpuchat.telemetry.machine import ROUGH

Fit = Literal["fits", "tight", "not free", "too large"]
TOO_LARGE = "does not fit: weights would be read from disk"
TOO_SLOW = 0.95
"""tok/s below which a model, shown as ≈0.9 or less, counts as too slow: a paragraph takes minutes."""
_SPARE_SHARE, _SPARE_BYTES = 0.05, 500_000_000
_MUCH = 0.02  # of a factor that a model has of its own, from which it is told
_N_CTX = 8192  # of a load, unless the settings or the model say otherwise
_BUFFERS, _MAX_BUFFERS = 0.01, 2e9  # of the engine, as a share of the weights


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True):
    """What a model needs of the memory of a machine, in bytes; `draft_need` for the draft model beside it. `exact`
    False: estimated from the file size; to be shown with "≈"."""

    need: MemoryNeed
    draft_need: MemoryNeed | None = None
    available: int
    total_memory: int
    exact: bool = True

    @property
    def needed(self) -> int:
        """Return all memory needed, the draft model included."""
        return self.need.min_bytes + (self.draft_need.min_bytes if self.draft_need is not None else 0)

    @property
    def verdict(self) -> Fit:
        """Return whether it fits.

        - "too large": it needs more than the machine has for models, whatever runs there;
        - "not free": it needs more than is available now, and the engine would refuse it;
        - "tight": it loads, but leaves less than a twentieth of the memory (at least 0.5 GB) for everything else, so
          that files of other programs, or its own weights, are evicted from the page cache;
        - "fits": it leaves more."""
        if self.needed > self.available:
            usable = self.total_memory - spare_bytes(self.total_memory)
            return "not free" if self.needed <= usable else "too large"
        return "tight" if self.needed + spare_bytes(self.total_memory) > self.available else "fits"

    @property
    def outcome(self) -> str:
        """Return the verdict, and of what does not fit now when it would."""
        if self.needed > self.available and self.draft_need is not None and self.need.min_bytes <= self.available:
            return f"{self.verdict}, but it fits without the draft model"
        if self.verdict == "not free":
            return f"not free while other programs use {gigabytes(self.total_memory - self.available)} GB"
        return self.verdict

    @property
    def needed_of_free(self) -> str:
        """`6.3 of 21.4 GB free`."""
        return f"{'' if self.exact else '≈'}{gigabytes(self.needed)} of {gigabytes(self.available)} GB free"

    @property
    def explained(self) -> str:
        """`6.3 of 21.4 GB free: fits · weights 4.7 + KV cache 0.5 (8,192 tokens) + draft 0.7 + buffers 0.4`."""
        return f"{self.needed_of_free}: {self.outcome} · {self.need.breakdown(self.draft_need)}"


class Prediction(MemoryFit, frozen=True, kw_only=True):
    """The predicted memory need and speed of a model on a machine. `need` is for a context of `need.n_ctx` tokens.

    `scalar_type` is the tensor type that most of it has, if this CPU computes that without vector instructions, which
    is several times slower: then no speed is predicted. `bytes_per_token` is what a plain pass reads with `N_PAST`
    tokens in the context; `tok_s` is None if not known, as `limit_tok_s`, which reading memory allows, is where
    caches hold the weights. `basis` says what the speed is based on, or why there is none.
    `low_tok_s` is the low end of the range of `tok_s`, equal to it where that is no rough estimate. `cost` is what the
    parts of a pass take. `context_that_fits` is the longest context in tokens (0: not even a short one, or not known).
    """

    bytes_per_token: int
    tok_s: float | None = None
    low_tok_s: float | None = None
    limit_tok_s: float | None = None
    cost: PassCost | None = None
    basis: str = ""
    scalar_type: str = ""
    context_that_fits: int = 0

    @property
    def too_slow(self) -> bool:
        """Return whether it would be loaded, but write less than about one token per second."""
        return self.tok_s is not None and self.tok_s < TOO_SLOW


def predict(
    header: GGUFHeader, options: LoadOptions, machine: Machine, *, draft: GGUFHeader | None = None, exact: bool = True
) -> Prediction:
    """Predict the model of `header` (all parts of a split one), loaded with `options`. The memory is what the engine
    computes before a load. `draft`: header of a draft model to be loaded beside it. `exact`: False: the tensors are
    those of a similar model."""
    if draft is not None:  # more snapshots of a recurrent state are kept then
        options = msgspec.structs.replace(options, draft_path=str(draft.path))
    need, _ = plan_memory(header, options, machine.available)
    if need.min_bytes > machine.available:  # as it would be without other programs, not with the shortest context
        need, _ = plan_memory(header, options, machine.total - spare_bytes(machine.total))
    return _judged(
        machine,
        need,
        draft_memory(draft, options, need.n_ctx, header) if draft is not None else None,
        model_work(header, options, alike=ALIKE),
        context_that_fits=largest_context(header, options, machine.available, draft),
        factor=machine.factor_of(header.path) if exact else 1.0,
        exact=exact,
    )


def predict_like(
    sample: GGUFHeader,
    size: int,
    quantization: str,
    options: LoadOptions,
    machine: Machine,
    *,
    draft: GGUFHeader | None = None,
) -> Prediction:
    """Predict another quantization of the model of `sample`: everything but the weights is the same. The memory is
    exact; all matrices count as of the main type. `size`: bytes of its file, whose header is as large as that of the
    sample."""
    share = (size - sample.file_size + sample.size) / max(sample.size, 1)
    kind = main_type(quantization)
    tensors = [
        msgspec.structs.replace(
            tensor,
            nbytes=round(share * tensor.nbytes),
            # The repacked copy of some types is larger.
            type=kind if kind in BY_NAME and len(tensor.shape) > 1 else tensor.type,
        )
        for tensor in sample.tensors
    ]
    resized = msgspec.structs.replace(sample, tensors=tensors)
    return predict(resized, options, machine, draft=draft, exact=False)


def estimate(
    size: int, machine: Machine, *, quantization: str = "", params: float = 0.0, active: float = 1.0, id: str = ""
) -> Prediction:
    """Predict a model of which only the file size is known; `size` in bytes, of all parts of a split one.

    The other arguments are those of `typical_work`."""
    work = typical_work(max(size, 1), quantization, params=params, active=active, id=id)
    return _judged(machine, usual_need(size, work), None, work, exact=False)


def estimate_local(model: LocalModel, machine: Machine) -> Prediction:
    """Predict a model on this machine without opening its file: the speed by its header as the library has it, the
    memory by its size and attention."""
    known, work = model.work is not None, local_work(model)
    need = usual_need(model.size, work, min(_N_CTX, model.n_ctx_train or _N_CTX))
    return _judged(machine, need, None, work, factor=machine.factor_of(model.path),
                   exact=False, exact_work=known)  # fmt: skip


def local_work(model: LocalModel, id: str = "") -> ModelWork:
    """Return the work of a model on this machine, without opening its file. `id`: of the catalog, where its header is
    not known."""
    if model.work is not None:
        return msgspec.structs.replace(model.work, alike=ALIKE)
    params = float(model.n_params)
    active = model.n_params_active / params if params and model.n_params_active else 1.0
    return typical_work(max(model.size, 1), model.quantization, params=params, active=active, id=id)


def usual_need(size: float, work: ModelWork, n_ctx: int = _N_CTX, kv: float | None = None) -> MemoryNeed:
    """Return what a model with a file of `size` bytes needs with a context of `n_ctx` tokens. `kv`: bytes of its KV
    cache; None: as F16, of the attention of `work`."""
    if kv is None:
        n_ubatch = LoadOptions().n_ubatch
        kv = sum(one.nbytes * kv_cells(one.window, n_ctx, n_ubatch) for one in work.attention)
    buffers = PROCESS_BYTES + min(_BUFFERS * size, _MAX_BUFFERS)
    kv, lazy = kv + work.state, round(work.on_disk)
    return MemoryNeed(round(size), repack=0, kv=round(kv), compute=round(buffers), reclaimable=lazy, n_ctx=n_ctx)


def _judged(
    machine: Machine,
    need: MemoryNeed,
    draft_need: MemoryNeed | None,
    work: ModelWork,
    *,
    context_that_fits: int = 0,
    factor: float = 1.0,
    exact: bool = True,
    exact_work: bool = False,
) -> Prediction:
    """Predict the speed of `work` where it fits; its passes take `factor` times as long as by the profile."""
    n_past = min(N_PAST, need.n_ctx) if need.n_ctx else N_PAST
    found = Prediction(
        need=need,
        draft_need=draft_need,
        available=machine.available,
        total_memory=machine.total,
        bytes_per_token=round(bytes_read(work, 1, n_past)),
        scalar_type=scalar_type_of(work, machine.scalar_types),
        context_that_fits=context_that_fits,
        exact=exact,
    )
    if found.verdict == "too large" or found.scalar_type or machine.profile is None:
        why_not = why_slow(found.scalar_type) if found.scalar_type else machine.peak_source
        return msgspec.structs.replace(found, basis=TOO_LARGE if found.verdict == "too large" else why_not)
    cost = pass_cost(machine.profile, work, 1, n_past)
    own_cost = PassCost(factor * cost.fixed, factor * cost.read, factor * cost.compute)
    is_cached = work.weight_bytes <= machine.cache_bytes
    source = ("from L3" if is_cached else machine.source) + ", by its own passes" * (abs(factor - 1) > _MUCH)
    rate = machine.profile.read_rate(work.weight_bytes) / factor
    basis = f"{units.bandwidth(rate)} GB/s ({source}) ÷ {units.size(found.bytes_per_token)} per token; "
    basis += units.takes("memory", cost.read / cost.seconds)  # the first ÷ the second × this is the speed
    basis = basis if exact or exact_work else f"≈ from the file size: {basis}"
    reads = max(machine.peak, machine.probed * rate)
    limit = reads / found.bytes_per_token if not is_cached else None
    tok_s = 1 / own_cost.seconds
    low = tok_s / ROUGH if machine.rough else tok_s
    return msgspec.structs.replace(found, tok_s=tok_s, low_tok_s=low, limit_tok_s=limit, cost=own_cost, basis=basis)


def spare_bytes(total: float) -> int:
    """Return what must be left of `total` bytes of memory for everything else."""
    return max(round(_SPARE_SHARE * total), _SPARE_BYTES)
