"""Plans a model on a machine (does it fit, how fast, for how many chats at once), and compares plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from cpuchat.base.errors import UsageError
from cpuchat.costs.calibrations import MAX_TOKENS
from cpuchat.costs.model import (
    CostProfile,
    batch_rate,
    bytes_read,
    compute_ceiling,
    max_users,
    pair_costs,
    pass_cost,
    prefill_cost,
)
from cpuchat.costs.usual import SCENARIOS
from cpuchat.models.catalog import PACE, Catalog
from cpuchat.models.drafts.candidates import WORTH, gain
from cpuchat.models.fit import PROCESS_BYTES, MemoryNeed, plan_memory
from cpuchat.models.gguf.header import read_model
from cpuchat.models.prediction import TOO_LARGE, MemoryFit
from cpuchat.models.support import scalar_type_of, why_slow
from cpuchat.planner.specs import HERE, MachineSpec, PlannedModel, from_catalog
from cpuchat.protocol.messages import LoadOptions

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
"""Acceptance rates per token: open chat 0.6 to 0.75, code 0.8 to 0.95, with a small model of the same family."""
MAX_USERS = 1024
"""Chats decoded together that are tried: llama-server and vLLM allow some hundred."""
_USABLE = 0.95
_BUFFERS, _MAX_BUFFERS = 0.01, 2e9  # of the engine, as a share of the weights


class PlannedWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The work to plan for: tokens of context per chat, of a prompt, and of an answer, the target `tok_s` of each user,
    and what an hour of the machine costs (0: not known)."""

    n_ctx: int = 8192
    n_prompt: int = 500
    n_answer: int = 300
    tok_s: float = PACE
    usd_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if self.n_prompt + self.n_answer > self.n_ctx:
            raise UsageError(
                f"{self.n_prompt} tokens of prompt and {self.n_answer} of answer exceed the context of {self.n_ctx}.",
                f"Use --ctx {self.n_prompt + self.n_answer} or more.",
            )

    def usd_per_million(self, rates: Range) -> Range | None:
        """Return what a million tokens cost at these rates; None where that is not known."""
        priced = self.usd_per_hour and rates.low > 0
        return rates.map(lambda rate: 1e6 * self.usd_per_hour / (3600 * rate)) if priced else None

    @property
    def n_past(self) -> float:
        """Return the tokens in the context in the middle of an answer."""
        return self.n_prompt + self.n_answer / 2


class Range(msgspec.Struct, frozen=True):
    """A figure between `low` and `high`; `value` is expected."""

    low: float
    value: float
    high: float

    def map(self, change: Callable[[float], float]) -> Range:
        """Return the range of `change(figure)`."""
        low, value, high = sorted(change(one) for one in (self.low, self.value, self.high))
        return Range(low, value, high)


class Drafted(msgspec.Struct, frozen=True, kw_only=True):
    """With a draft model at an `acceptance` rate per token: the best `depth` (0: off), tok/s and the speed-up."""

    acceptance: float
    depth: int
    tok_s: Range
    speedup: Range

    @property
    def pays(self) -> bool:
        """Return whether drafting is worth a second model."""
        return self.depth > 0 and self.speedup.value >= WORTH


class CapacityPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a machine.

    `tok_s` of one chat in the middle of an answer; None when it does not fit. `limit` takes most of a pass, with
    `limit_share` of it. `ttft_s` of the prompt on an idle machine. Ceilings in tok/s: if only reading took time, and if
    only computing did, which no drafter exceeds. `users`: chats that can be decoded together at the target rate each,
    at most what memory holds (`users_by_memory`).

    `scalar_type`: as of `Prediction`; then no speed is planned.
    """

    machine: MachineSpec
    model: PlannedModel
    draft: PlannedModel | None
    workload: PlannedWorkload
    memory: MemoryFit
    users_by_memory: int
    bytes_per_token: float
    tok_s: Range | None = None
    limit: str = ""
    limit_share: float = 0.0
    prefill_tok_s: Range | None = None
    ttft_s: Range | None = None
    memory_ceiling: Range | None = None
    compute_ceiling: Range | None = None
    drafted: tuple[Drafted, ...] = ()
    draft_ceiling: Range | None = None
    users: Range | None = None
    shared_tok_s: Range | None = None
    usd_per_million: Range | None = None
    shared_usd_per_million: Range | None = None
    scalar_type: str = ""

    @property
    def verdict(self) -> str:
        """Return whether the machine holds the model, or `no SIMD`."""
        verdict = self.memory.verdict
        return "no SIMD" if self.scalar_type and verdict != "too large" else verdict

    @property
    def why_not(self) -> str:
        """Return why there is no speed; "" when there is one."""
        if self.memory.verdict == "too large":
            return TOO_LARGE
        return why_slow(self.scalar_type) if self.scalar_type else ""


def make_plan(
    machine: MachineSpec, model: PlannedModel, workload: PlannedWorkload, *, draft: PlannedModel | None = None
) -> CapacityPlan:
    """Plan `model` on `machine`."""
    total, n_ctx = 1e9 * machine.memory_gb.value, workload.n_ctx
    if n_ctx == PlannedWorkload().n_ctx:  # as a load chooses it
        n_ctx = max(min(n_ctx, model.n_ctx_train or n_ctx), workload.n_prompt + workload.n_answer)
    available = round(1e9 * machine.free_gb.value if machine.free_gb is not None else _USABLE * total)
    need, draft_need = _need(machine, model, n_ctx, available), None
    if draft is not None:
        kv = draft.kv_bytes(min(n_ctx, draft.n_ctx_train or n_ctx))
        draft_need = MemoryNeed(weights=round(draft.size), repack=0, kv=round(kv), compute=0)
    memory = MemoryFit(need=need, draft_need=draft_need, available=available, total_memory=round(total))
    each = memory.need.kv + (draft_need.kv if draft_need is not None else 0)
    plan = CapacityPlan(
        machine=machine,
        model=model,
        draft=draft,
        workload=workload,
        memory=memory,
        users_by_memory=max((memory.available - memory.needed + each) // each, 0) if each else MAX_USERS,
        bytes_per_token=bytes_read(model.work, 1, workload.n_past),
        scalar_type=scalar_type_of(model.work, machine.scalar_types),
    )
    if plan.why_not:
        return plan
    work, past = model.work, workload.n_past
    middle = pass_cost(machine.profile(), work, 1, past)
    tok_s = _over(machine, lambda profile: 1 / pass_cost(profile, work, 1, past).seconds)
    ttft_s = _over(machine, lambda profile: prefill_cost(profile, work, workload.n_prompt).seconds)
    by_memory = min(plan.users_by_memory, MAX_USERS)
    chats = [max_users(machine.profile(name), work, workload.tok_s, past, by_memory) for name in SCENARIOS]
    together = [
        n * batch_rate(machine.profile(name), work, n, past) if n else 0.0
        for name, n in zip(SCENARIOS, chats, strict=True)
    ]
    shared = _ordered(together)
    # As if only reading took time, like the chat's panel; it is faster where the caches hold the weights.
    cached = machine.profile().read_rate(work.weight_bytes)
    reading = (max(1e9 * machine.read_gbs.at(name), cached) / plan.bytes_per_token for name in SCENARIOS)
    plan = msgspec.structs.replace(
        plan,
        tok_s=tok_s,
        usd_per_million=workload.usd_per_million(tok_s),
        shared_usd_per_million=workload.usd_per_million(shared),
        limit=middle.limit,
        limit_share=middle.limit_share,
        prefill_tok_s=ttft_s.map(lambda seconds: workload.n_prompt / seconds),
        ttft_s=ttft_s,
        memory_ceiling=Range(*reading),
        compute_ceiling=_over(machine, lambda profile: compute_ceiling(profile, work, past)),
        users=_ordered(chats),
        shared_tok_s=shared,
    )
    if draft is not None and not scalar_type_of(draft.work, machine.scalar_types):
        *drafted, everything = _drafted(machine, plan, draft, (*ACCEPTANCES, 1.0))
        plan = msgspec.structs.replace(plan, drafted=tuple(drafted), draft_ceiling=everything.tok_s)
    return plan


def _need(machine: MachineSpec, model: PlannedModel, n_ctx: int, available: int) -> MemoryNeed:
    """Return the memory of a model: of a file on this machine as the lists have it."""
    if machine.id == HERE and model.path:
        return plan_memory(read_model(Path(model.path)), LoadOptions(n_ctx=n_ctx), available)[0]
    return MemoryNeed(
        weights=round(model.size - model.work.on_disk),
        repack=0,
        kv=round(model.kv_bytes(n_ctx) + model.work.state),
        compute=round(PROCESS_BYTES + min(_BUFFERS * model.size, _MAX_BUFFERS)),
        n_ctx=n_ctx,
    )


def _over(machine: MachineSpec, figure: Callable[[CostProfile], float]) -> Range:
    """Return a figure with the profiles of all scenarios."""
    return _ordered([figure(machine.profile(name)) for name in SCENARIOS])


def _ordered(figures: Sequence[float]) -> Range:
    low, value, high = figures
    return Range(min(low, high), value, max(low, high))


def _drafted(
    machine: MachineSpec, plan: CapacityPlan, draft: PlannedModel, acceptances: Sequence[float]
) -> list[Drafted]:
    work, past = plan.model.work, plan.workload.n_past
    pairs = [pair_costs(machine.profile(name), work, draft.work, past, MAX_TOKENS) for name in SCENARIOS]
    found: list[Drafted] = []
    for acceptance in acceptances:
        gains = [
            gain([1e3 * one for one in pair.verify], 1e3 * (machine.draft_factor or 1.0) * pair.draft, acceptance)
            for pair in pairs
        ]
        tok_s = _ordered([best.speedup / pair.verify[0] for best, pair in zip(gains, pairs, strict=True)])
        speedup = _ordered([best.speedup for best in gains])
        found.append(Drafted(acceptance=acceptance, depth=gains[1].depth, tok_s=tok_s, speedup=speedup))
    return found


NONE_HERE: Mapping[str, PlannedModel] = MappingProxyType({})
MachineFor = Callable[[PlannedModel | None, PlannedModel | None], MachineSpec]
"""Returns a machine as a model and its draft model use it, as `ThisMachine.of`."""


def catalog_plans(
    machine_for: MachineFor, catalog: Catalog, workload: PlannedWorkload, here: Mapping[str, PlannedModel] = NONE_HERE
) -> list[CapacityPlan]:
    """Return a plan for each chat model of the catalog, in its usual quantization, that fits the machine, the fastest
    first; those of `here` (`models_here`) are planned by their files."""
    chat = [entry for entry in catalog.models if entry.use != "draft" and entry.sizes]
    models = [here.get(entry.id) or from_catalog(entry) for entry in chat]
    plans = [make_plan(machine_for(model, None), model, workload) for model in models]
    return fastest_first(plan for plan in plans if plan.tok_s is not None)


def fastest_first(plans: Iterable[CapacityPlan]) -> list[CapacityPlan]:
    """Return the plans by speed; those without one last."""
    return sorted(plans, key=lambda plan: plan.tok_s.value if plan.tok_s is not None else 0.0, reverse=True)


def usual_draft(
    target: PlannedModel, catalog: Catalog, here: Mapping[str, PlannedModel] = NONE_HERE
) -> PlannedModel | None:
    """Return the best draft model that the catalog has for one of its models, if any. `here` as of `catalog_plans`."""
    entry = next((one for one in catalog.models if one.name == target.name), None)
    drafts = catalog.drafts_of(entry) if entry is not None else []
    return next((here.get(one.id) or from_catalog(one) for one in drafts if one.sizes), None)
