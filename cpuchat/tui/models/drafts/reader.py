"""Reads headers, measurements and Hugging Face for the screen of draft models. Blocks: call it in threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cpuchat.errors import HubError
from cpuchat.model_info import ModelInfo
from cpuchat.models.drafts.candidates import Candidate, candidates, check, model_of
from cpuchat.models.drafts.chosen import ChosenDrafts
from cpuchat.models.drafts.gain import measured_acceptance
from cpuchat.models.drafts.heads import heads_of, local_heads, repository_of
from cpuchat.tui.models.reader import ModelsReader
from cpuchat.tui.services import Services

if TYPE_CHECKING:
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.models.hub.repository import RepoModel, Repository


@dataclass(frozen=True)
class DraftReader:
    """Reads for the loaded model. `acceptance` was measured with its draft model, None if not."""

    services: Services
    models: ModelsReader
    loaded: ModelInfo
    acceptance: float | None = None

    @classmethod
    def of(cls, services: Services) -> DraftReader:
        """Create one for the loaded model (there must be one), with the acceptance of its last answer."""
        conversation = services.conversation
        assert conversation.model is not None
        timings = next((m.timings for m in reversed(conversation.messages) if m.timings is not None), None)
        acceptance = measured_acceptance(timings.speculation if timings is not None else None)
        models = ModelsReader(services.library, services.settings, conversation.model)
        return cls(services, models, conversation.model, acceptance)

    def candidates(self) -> tuple[GGUFHeader, list[Candidate]]:
        """Return the target's header and the candidates, unchecked.

        Raises:
            ModelNotFound, ModelDamaged: the file of the loaded model is gone or has changed.
        """
        from cpuchat.models.drafts.calibrations import target_costs
        from cpuchat.models.tuned_machine import machine_for

        target = self.models.header(Path(self.loaded.path))
        costs = target_costs(target.path)
        if self.loaded.pass_ms:  # measured with the cores in use
            costs = msgspec.structs.replace(costs, pass_ms=self.loaded.pass_ms)
        here = self.services.library.local_models(beside=target.path)
        beside = next((model.path for model in here if self.is_loaded(model.name, model.quantization)), None)
        machine = machine_for(target.path, self.models.settings, self.loaded)
        found = candidates(target, here, self.models.catalog(), costs, machine,
                           acceptance=self.acceptance, beside=beside)  # fmt: skip
        return target, [*local_heads(target, here), *found]

    def heads_on_hub(self, target: GGUFHeader, found: Iterable[Candidate]) -> list[Candidate]:
        """Return the draft heads in the target's repository that are not `found` here; [] when it cannot be reached."""
        repo = repository_of(target, self.models.local_models())
        if not repo:
            return []
        with contextlib.suppress(HubError):
            return heads_of(self.services.hub.repository(repo), found)
        return []

    def is_loaded(self, name: str, quantization: str) -> bool:
        """Return whether it is the loaded draft model."""
        return bool(name) and (name, quantization) == (self.loaded.draft, self.loaded.draft_quantization)

    def chosen(self) -> str:
        """Return what was chosen for the loaded model: a file, "none", or "" for the one that belongs to it."""
        return ChosenDrafts().of(Path(self.loaded.path))

    def check(self, candidate: Candidate, target: GGUFHeader) -> Candidate:
        """Return the candidate with its verdict, or why there is none; for a remote one, its header is requested."""
        return check(candidate, target, hub=self.services.hub)

    def to_download(self, candidate: Candidate) -> tuple[Repository, RepoModel]:
        """Find its file. Raises HubError and its kinds."""
        repository = self.services.hub.repository(candidate.repo)
        return repository, model_of(repository, candidate)
