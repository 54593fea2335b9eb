"""Predicts the models of a repository before any is downloaded.

A header is some MB, most of it the vocabulary, which precedes the tensor list. Quantizations of a model differ only in
their weights, so one header is read, and the others are predicted from it and their sizes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from cpuchat.errors import AccessDenied, CpuchatError, HubOffline, ModelDamaged, RateLimited
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.hub.choice import loadable, usual_first
from cpuchat.models.hub.client import Hub
from cpuchat.models.hub.repository import Data, RepoModel, Repository
from cpuchat.models.machine import Machine
from cpuchat.models.prediction import Prediction, estimate, predict, predict_like
from cpuchat.protocol import LoadOptions

_FINAL = (HubOffline, RateLimited, AccessDenied)
"""Errors that every further request would meet, too."""
_MAX_HEADERS = 25
"""Limit of headers requested per repository: a repository may list any number of models."""
_MAX_SECONDS = 20.0
"""Seconds after which no further header is requested."""


class ModelPrediction(Data, frozen=True):
    """`problem`: why the header could not be read, "" when it was, or was not requested. `damaged`: the header was
    read, and no model could be loaded with it."""

    model: RepoModel
    prediction: Prediction
    problem: str = ""
    damaged: bool = False


def predict_repository(
    hub: Hub | None,
    repository: Repository,
    options: LoadOptions,
    machine: Machine,
    *,
    draft: GGUFHeader | None = None,
    first: RepoModel | None = None,
) -> Iterator[ModelPrediction]:
    """Yield the prediction of every loadable model, those whose headers were read first. Blocks on the network.

    Of each model the header of the usual quantization is read, or the next one where that fails; `first` in any case.
    When the hub is unreachable or refuses, or after many, no other is requested.
    """
    models = usual_first(loadable(repository.models))
    headers: dict[str, tuple[RepoModel, GGUFHeader]] = {}
    faults: dict[RepoModel, CpuchatError] = {}
    asked, until = 0, time.monotonic() + _MAX_SECONDS
    for model in sorted(models, key=lambda one: one != first):
        if hub is None or asked == _MAX_HEADERS or time.monotonic() > until:
            break
        if model.base in headers:
            continue
        asked += 1
        try:
            header = hub.header(repository, model)
        except CpuchatError as error:
            faults[model] = error
            if isinstance(error, _FINAL):
                break
        else:
            headers[model.base] = model, header
            yield ModelPrediction(model=model, prediction=predict(header, options, machine, draft=draft))
    for model in models:
        sample, header = headers.get(model.base, (None, None))
        if model == sample:
            continue
        if header is None:
            expected = estimate(model.size, machine, quantization=model.quantization)
        else:
            expected = predict_by_sample(model, header, options, machine, draft=draft)
        yield _unread(model, expected, faults.get(model))


def predict_by_sample(
    model: RepoModel, sample: GGUFHeader, options: LoadOptions, machine: Machine, *, draft: GGUFHeader | None = None
) -> Prediction:
    """Predict a model by the header of another quantization of it (the same `RepoModel.base`)."""
    beside = sample.file_size - sample.size  # its own header will be as large
    return predict_like(sample, model.size - beside, model.quantization, options, machine, draft=draft)


def _unread(model: RepoModel, expected: Prediction, fault: CpuchatError | None) -> ModelPrediction:
    if isinstance(fault, ModelDamaged):
        return ModelPrediction(model=model, prediction=expected, problem=fault.message, damaged=True)
    return ModelPrediction(model=model, prediction=expected, problem=str(fault or ""))
