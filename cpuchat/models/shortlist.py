"""Selects the catalog models that suit a machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cpuchat.models.catalog import CatalogModel
from cpuchat.models.prediction import Prediction

PACE = 6.0
"""tok/s that keep up with reading: 270 words per minute at three words per four tokens; people read about 240
(Brysbaert 2019, doi:10.1016/j.jml.2019.104047)."""
_USUAL_BANDWIDTH = 25e9  # bytes/s of decoding on a laptop with two memory channels; where nothing was measured
_MOST = 8


@dataclass(frozen=True)
class Ranked:
    """The catalog for one machine, each model once. `suits` is short: fits, keeps up with reading, one per publisher.
    `others` may fit or be tight, or their size is unknown. All newest first."""

    suits: tuple[CatalogModel, ...] = ()
    others: tuple[CatalogModel, ...] = ()
    too_large: tuple[CatalogModel, ...] = ()


NOTHING = Ranked()


def ranked(models: Iterable[CatalogModel], predictions: Mapping[str, Prediction]) -> Ranked:
    """Order the models by their predictions.

    Args:
        predictions: by id; without one a model is among the `others`.
    """
    newest = sorted(models, key=lambda model: -model.year)
    too_large = tuple(model for model in newest if _verdict(model, predictions) == "too large")
    best: dict[str, CatalogModel] = {}
    for model in newest:
        prediction = predictions.get(model.id)
        if prediction is None or prediction.verdict != "fits" or model.use != "chat" or "repo" not in model.verified:
            continue
        if _pace(prediction) >= PACE:
            maker = model.publisher or model.family
            best[maker] = max(best.get(maker, model), model, key=_worth)
    suits = tuple(sorted(best.values(), key=_worth, reverse=True)[:_MOST])
    listed = {model.id for model in (*suits, *too_large)}
    return Ranked(suits, tuple(model for model in newest if model.id not in listed), too_large)


def _worth(model: CatalogModel) -> tuple[int, float]:
    """Return a sort key: newer models first, among those of a year the larger one."""
    return model.year, model.params


def _verdict(model: CatalogModel, predictions: Mapping[str, Prediction]) -> str:
    return predictions[model.id].verdict if model.id in predictions else ""


def _pace(prediction: Prediction) -> float:
    """Return tok/s, as predicted or else for a usual machine."""
    return prediction.tok_s or _USUAL_BANDWIDTH / max(prediction.bytes_per_token, 1)
