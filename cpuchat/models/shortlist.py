"""Selects the catalog models that suit a machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cpuchat.models.catalog import CatalogModel
from cpuchat.models.machine import Machine
from cpuchat.models.prediction import Prediction, estimate

PACE = 5.0
"""tok/s at about reading speed: 225 words per minute at three words per four tokens; people read about 240 (Brysbaert
2019, doi:10.1016/j.jml.2019.104047).
"""
_PERMISSIVE = frozenset({"apache-2.0", "mit", "modified-mit"})
_RESEARCH_ONLY = frozenset({"cc-by-nc-4.0", "mrl", "qwen-research"})
_USUAL_BANDWIDTH = 25e9  # bytes/s of decoding on a laptop with two memory channels; where nothing was measured
_COMMON_BYTES = 2.5e9
"""A model of 4B parameters in 4 bits: useful for most, quick to download, and at reading pace on most machines. Without
any speed, models near it are preferred ..."""
_MOST_UNMEASURED_BYTES = 6e9
"""... and larger ones are not recommended."""
_MOST_MEMORY = 0.5
"""Share of the machine's memory that a recommended model takes: the rest is for the user's other programs."""
_MOST = 8


@dataclass(frozen=True)
class Ranked:
    """The catalog for one machine, each model once, the newest year first.

    `suits` is short: fits into half of the memory, keeps up with reading (where no speed is known: is small), not for
    research only; one chat model per publisher, then one for code. `unsuitable`: too large or too slow. `others`: the
    rest.
    """

    suits: tuple[CatalogModel, ...] = ()
    others: tuple[CatalogModel, ...] = ()
    unsuitable: tuple[CatalogModel, ...] = ()


NOTHING = Ranked()


def estimate_entry(model: CatalogModel, machine: Machine) -> Prediction:
    """Predict a model of the catalog in its default quantization, of which the size must be known."""
    return estimate(
        model.size,
        machine,
        quantization=model.quantization,
        params=1e9 * model.params,
        active=model.active_share,
        id=model.id,
    )


def estimates(models: Iterable[CatalogModel], machine: Machine) -> dict[str, Prediction]:
    """Return predictions by id, from the file sizes of the default quantizations; none where that is not known."""
    return {model.id: estimate_entry(model, machine) for model in models if model.size}


def ranked(models: Iterable[CatalogModel], predictions: Mapping[str, Prediction]) -> Ranked:
    """Order the models by their predictions.

    Args:
        predictions: by id; without one a model is among the `others`.
    """
    newest = sorted(models, key=lambda model: -model.year)
    unsuitable = tuple(model for model in newest if _unsuitable(predictions.get(model.id)))
    measured = any(prediction.tok_s is not None for prediction in predictions.values())
    worth = _worth if measured else _worth_unmeasured
    best: dict[str, CatalogModel] = {}
    for model in newest:
        if _recommendable(model, predictions.get(model.id)) and (measured or model.size <= _MOST_UNMEASURED_BYTES):
            place = "code" if model.use == "code" else model.publisher or model.family
            best[place] = max(best.get(place, model), model, key=worth)
    code = (best.pop("code"),) if "code" in best else ()
    chat = sorted(best.values(), key=worth, reverse=True)[: _MOST - len(code)]
    suits = (*chat, *code)
    listed = {model.id for model in (*suits, *unsuitable)}
    return Ranked(suits, tuple(model for model in newest if model.id not in listed), unsuitable)


def _recommendable(model: CatalogModel, prediction: Prediction | None) -> bool:
    return (
        model.use in ("chat", "code")
        and model.license not in _RESEARCH_ONLY
        and "repo" in model.verified
        and prediction is not None
        and prediction.verdict == "fits"
        and prediction.needed <= _MOST_MEMORY * prediction.total_memory
        and _pace(prediction) >= PACE
    )


def _worth(model: CatalogModel) -> tuple[int, bool, float]:
    """Return a sort key: newer models first, of one year those with a permissive license, then the larger one."""
    return model.year, model.license in _PERMISSIVE, model.params


def _worth_unmeasured(model: CatalogModel) -> tuple[int, bool, float]:
    """As `_worth`, with the size nearest to `_COMMON_BYTES` in the place of the largest."""
    return model.year, model.license in _PERMISSIVE, -abs(math.log(max(model.size, 1) / _COMMON_BYTES))


def _unsuitable(prediction: Prediction | None) -> bool:
    return prediction is not None and (prediction.verdict == "too large" or prediction.too_slow)


def _pace(prediction: Prediction) -> float:
    """Return tok/s, as predicted or else for a usual machine."""
    return prediction.tok_s or _USUAL_BANDWIDTH / max(prediction.bytes_per_token, 1)
