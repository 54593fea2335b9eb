"""What is to be expected of a repository's models, before one of them is downloaded.

A header is some MB, most of it the vocabulary, which stands before what tells the weights. But the quantizations of
one model differ in their weights only, so one header of them is read, and the others are judged by it and their sizes.
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
"""What one header meets with, the next one would meet with, too."""
_MOST_HEADERS = 25
"""That are asked for, of one repository: a hub may list any number of models."""
_LONGEST = 20.0
"""Seconds after which no other header is asked for."""


class ModelPrediction(Data, frozen=True):
    """`problem`: why the header could not be read, "" when it was, or was not asked for.

    `damaged`: the header was read, and is none that a model could be loaded with.
    """

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
    """The prediction of every model that can be loaded, those whose headers were read first.

    Of each model the header of the usual quantization is read, or of the next one where that cannot be read; of
    `first` in any case. When the hub cannot be reached or refuses, or after many, no other is asked for. Blocks
    meanwhile.
    """
    models = usual_first(loadable(repository.models))
    headers: dict[str, tuple[RepoModel, GGUFHeader]] = {}
    faults: dict[RepoModel, CpuchatError] = {}
    asked, until = 0, time.monotonic() + _LONGEST
    for model in sorted(models, key=lambda one: one != first):
        if hub is None or asked == _MOST_HEADERS or time.monotonic() > until:
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
    """The prediction by the header of another quantization of the same model (the same `RepoModel.base`)."""
    beside = sample.file_size - sample.size  # its own header will be as long
    return predict_like(sample, model.size - beside, model.quantization, options, machine, draft=draft)


def _unread(model: RepoModel, expected: Prediction, fault: CpuchatError | None) -> ModelPrediction:
    if isinstance(fault, ModelDamaged):
        return ModelPrediction(model=model, prediction=expected, problem=fault.message, damaged=True)
    return ModelPrediction(model=model, prediction=expected, problem=str(fault or ""))
