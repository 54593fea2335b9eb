"""What models did on this machine, as observations for the fit of its profile: calibrations and chats."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cpuchat.costmodel.fit import KNOTS, Fitted, Observation, fit
from cpuchat.costmodel.profile import CostProfile, Rate
from cpuchat.costmodel.work import ModelWork
from cpuchat.errors import CpuchatError
from cpuchat.models.drafts.calibrations import target_costs
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library.model import LocalModel
from cpuchat.models.library.places import model_files
from cpuchat.models.library.usage import UsageSnapshot
from cpuchat.models.work import model_work

_N_PAST = 256  # in the middle of a short chat
_CHAT = 0.5
"""Weight of a chat: the best of a model's answers without other load, but one number for a changing context."""


def observations(models: Iterable[LocalModel], usage: UsageSnapshot) -> list[Observation]:
    """Return the calibrated passes of models on this machine, and the speed of chats with them without other load."""
    found: list[Observation] = []
    for model in models:
        if model.damaged or not model.name:
            continue
        pass_ms = target_costs(model.path).pass_ms
        chat = usage.of(model_files(model.path))
        if not pass_ms and not chat.share:
            continue
        try:
            work = model_work(read_model(model.path))
        except CpuchatError:
            continue
        key = str(model.path)
        found += [
            Observation(work=work, n_tokens=n, n_past=_N_PAST, seconds=pass_ms[n - 1] / 1e3, model=key)
            for n in KNOTS
            if n <= len(pass_ms)
        ]
        if chat.share and chat.peak > 0:
            seconds = chat.per_token / (chat.share * chat.peak)
            found.append(Observation(work=work, n_tokens=1, n_past=_N_PAST, seconds=seconds, weight=_CHAT, model=key))
    return found


def fitted_here(start: CostProfile, seen: list[Observation]) -> Fitted:
    """Fit a profile that starts from that of a usual machine of its kind."""
    types = dict.fromkeys([rate.type for rate in start.rates] + [kind for one in seen for kind in _types(one.work)])
    rates = tuple(Rate(kind, tuple((n, start.madd_rate(kind, n)) for n in KNOTS)) for kind in types)
    return fit(msgspec.structs.replace(start, rates=rates), seen)


def _types(work: ModelWork) -> list[str]:
    """Return the tensor types in which a model computes enough to say something about their rate."""
    parts = (*work.dense, *work.head, *work.experts)
    total = sum(one.madds for one in parts)
    return [one.type for one in parts if one.madds > 0.05 * total]
