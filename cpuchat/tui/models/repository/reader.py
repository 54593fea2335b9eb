"""Reads Hugging Face, the disk and the machine for the repository screen. Blocks: call it in threads."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.errors import HubError
from cpuchat.models.hub.repository import RepoModel, Repository
from cpuchat.models.library.places import hub_cache
from cpuchat.present.repository import key_of
from cpuchat.tui.models.repository.state import RepositoryState
from cpuchat.tui.services import Services

if TYPE_CHECKING:
    from cpuchat.models.drafts.choice import PlannedDraft
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.models.prediction import Prediction


@dataclass(frozen=True)
class RepositoryReader:
    """Reads one repository, whose model would replace the loaded one."""

    services: Services
    repo: str

    def read(self) -> RepositoryState:
        """Read what the hub lists, what of it is on this machine, and the machine.

        Raises:
            HubError: or one of its kinds.
        """
        from cpuchat.models.machine import this_machine

        services = self.services
        repository = services.hub.repository(self.repo)
        machine = this_machine(services.settings, loaded=services.conversation.model)
        state = RepositoryState(repository, machine, self._here())
        state.arrived = self.arrived(repository)
        return state

    @staticmethod
    def arrived(repository: Repository) -> dict[str, int]:
        """Return bytes of each model that earlier downloads left in the cache, by `key_of`; quick."""
        from cpuchat.models.downloads.hf_cache import bytes_here

        found: dict[str, int] = {}
        for model in repository.models:
            with contextlib.suppress(HubError):  # without a hash it can't be downloaded
                found[key_of(model)] = bytes_here(hub_cache(), repository.id, model.files)
        return found

    def _here(self) -> dict[str, Path]:
        """Return intact files of the repository on this machine: path in the repository, path here."""
        found: dict[str, Path] = {}
        for model in self.services.library.local_models():
            if model.repo.lower() == self.repo.lower() and (not model.damaged or model.kind == "head"):
                # The cache keeps files under snapshots/REVISION/, in the folders that they have in the repository.
                _, snapshots, inside = model.path.as_posix().rpartition("/snapshots/")
                if snapshots:
                    found[inside.partition("/")[2]] = model.path
        return found

    def header(self, repository: Repository, model: RepoModel) -> GGUFHeader:
        """Read it by range request, cached. Raises HubError and its kinds, ModelDamaged."""
        return self.services.hub.header(repository, model)

    def findings(self, state: RepositoryState, model: RepoModel) -> tuple[dict[str, Prediction], PlannedDraft | None]:
        """Predict from the header of `model`: return predictions by `key_of`, its own and those of its other
        quantizations, and the draft model counted in them.

        Raises:
            HubError, ModelDamaged: as `header`.
        """
        from cpuchat.models.prediction import predict
        from cpuchat.models.repository_prediction import predict_by_sample

        header, options = self.header(state.repository, model), self.services.settings.engine.load_options()
        beside = state.drafts[model.base] if model.base in state.drafts else self._draft(header)

        def expected(other: RepoModel, draft: GGUFHeader | None) -> Prediction:
            if other == model:
                return predict(header, options, state.machine, draft=draft)
            return predict_by_sample(other, header, options, state.machine, draft=draft)

        found: dict[str, Prediction] = {}
        for other in state.repository.models:
            if other.base == model.base and other.kind == "model":
                look = expected(other, beside.header if beside is not None else None)
                # A draft model that is not downloaded does not make a model too large.
                alone = beside is not None and not beside.here and look.verdict in ("with RPC", "too large")
                found[key_of(other)] = expected(other, None) if alone else look
        return found, beside

    def _draft(self, header: GGUFHeader) -> PlannedDraft | None:
        from cpuchat.models.drafts.choice import planned_draft

        services = self.services
        return planned_draft(header, services.settings.speculation.wanted_draft, services.library, services.hub)
