"""The state of one repository's models. Plain data, no widgets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.errors import AccessDenied, CpuchatError, NotOnHub
from cpuchat.models.downloads.state import Download
from cpuchat.models.hub.choice import choose, loadable, usual_first
from cpuchat.models.hub.repository import RepoModel, Repository
from cpuchat.present.repository import Known, key_of

if TYPE_CHECKING:
    from cpuchat.models.drafts.choice import PlannedDraft
    from cpuchat.models.machine import Machine
    from cpuchat.models.prediction import Prediction


@dataclass
class RepositoryState:
    """The state of a repository. `here`: local models by key. `judged`: results of reading a header, by key;
    `expected`: the predictions of models whose header was not read, by that of another quantization; `drafts`: by
    `RepoModel.base`; `arrived`: bytes by key.
    """

    repository: Repository
    machine: Machine
    here: dict[str, Path]
    judged: dict[str, Prediction | CpuchatError] = field(default_factory=dict)
    expected: dict[str, Prediction] = field(default_factory=dict)
    drafts: dict[str, PlannedDraft | None] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)

    def judge(self, model: RepoModel, predictions: dict[str, Prediction], draft: PlannedDraft | None) -> None:
        """Store what the header of `model` told."""
        self.judged[key_of(model)] = predictions[key_of(model)]
        self.expected |= predictions
        self.drafts[model.base] = draft

    def known(self, downloads: Iterable[Download], loaded: Path | None) -> list[Known]:
        """Return all models, in the order of the repository."""
        on_way = {d.model.files: d for d in downloads if d.repo == self.repository.id}
        done = {key_of(d.model): Path(d.path) for d in on_way.values() if d.state == "done"}
        here = {**self.here, **done}
        found: list[Known] = []
        closed = self._closed
        for model in self.repository.models:
            key = key_of(model)
            path = here.get(key)
            judged = self.judged.get(key, closed)
            failed = isinstance(judged, CpuchatError)
            found.append(
                Known(
                    model,
                    path=path,
                    arrived=self.arrived.get(key, 0),
                    loaded=path is not None and path == loaded,
                    download=on_way.get(model.files),
                    prediction=judged if judged is not None and not failed else self._estimate(model),
                    draft=self.drafts.get(model.base) if model.kind == "model" else None,
                    problem=judged if failed else None,
                )
            )
        return found

    def to_judge(self, key: str) -> RepoModel | None:
        """Return the model of this key if its header was not read yet and is worth it."""
        if self._closed is not None:
            return None
        for model in self.repository.models:
            if key_of(model) == key and key not in self.judged and model.kind == "model" and model.complete:
                return model
        return None

    @property
    def _closed(self) -> AccessDenied | None:
        """Return why no file of this repository can be read: access is denied for all of them."""
        return next((found for found in self.judged.values() if isinstance(found, AccessDenied)), None)

    def first_mark(self, quantization: str = "") -> str:
        """Return the key to select: the one with `quantization`, one on this machine, or the usual one; "" for none."""
        if quantization:
            with contextlib.suppress(NotOnHub):
                return key_of(choose(self.repository, quantization))
        chat = usual_first(loadable(self.repository.models)) or list(self.repository.models)
        keys = [key_of(model) for model in chat]
        return next((key for key in keys if key in self.here), keys[0] if keys else "")

    def _estimate(self, model: RepoModel) -> Prediction | None:
        """Predict from another quantization of the same model, else from its size; None before any header was asked
        for."""
        from cpuchat.models.prediction import estimate

        if model.kind != "model" or not self.judged:
            return None
        expected = self.expected.get(key_of(model))
        return expected or estimate(model.size, self.machine, quantization=model.quantization)
