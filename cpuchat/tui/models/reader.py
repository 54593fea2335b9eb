"""Reads models and this machine for the models screen.

Every method of `ModelsReader` that is not async blocks: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.config.servers import ServerModel, Source, normalized, running_servers
from cpuchat.config.settings import Settings
from cpuchat.models.catalog import Catalog, CatalogModel, estimate_entry, load_catalog, match_local
from cpuchat.models.downloads.state import Download
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.library.deleting import Deletion
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import LocalModel, is_inside
from cpuchat.present.models import head_words
from cpuchat.session.attachments import completions, start_folder
from cpuchat.tui.models.entries import FOLDER, ModelDetails, ServerEntry, Subject, TypedPath, problem_at

if TYPE_CHECKING:
    from cpuchat.backend.remote.backend import RemoteBackend
    from cpuchat.config.servers import KeyRing
    from cpuchat.models.machine import Machine
    from cpuchat.models.prediction import Prediction
    from cpuchat.protocol.model_info import ModelInfo


@dataclass(frozen=True)
class ModelsReader:
    """Reads with the current settings; `loaded` is the model that another one would replace."""

    library: Library
    settings: Settings
    loaded: ModelInfo | None = None

    def local_models(self) -> list[LocalModel]:
        return self.library.local_models()

    def typed(self, text: str, path: Path) -> TypedPath:
        """Return what is at the path that was typed as `text`, but for the models below a folder."""
        problem = problem_at(path)
        plain = text if paths.expanded(text) == path else str(path)  # or in quotes, escaped, a `file://`
        begun = f"{plain.rstrip('/')}/" if problem == FOLDER else plain
        marks = (mark.removeprefix("@").strip('"') for mark in completions(f"@{begun}", start_folder()))
        shown = tuple(one for one in marks if one.endswith("/") or one.lower().endswith(".gguf"))
        is_known = problem == FOLDER and any(is_inside(path, one) for one in self.library.folders)
        return TypedPath(text, problem, None, shown, is_known)

    def models_at(self, path: Path) -> tuple[LocalModel, ...]:
        """Return the models below a folder, of very many some, or the one in a file."""
        if path.is_dir():
            return tuple(self.library.in_folder(path))
        model = self.library.at(path)
        return (model,) if model is not None else ()

    def server_urls(self) -> list[str]:
        """Return the servers of the settings, those that run here, and that of the loaded model, each once."""
        found = [normalized(url) for url in self.settings.servers.urls]
        found += [one.url for one in running_servers()]
        if self.loaded is not None and self.loaded.server:
            found.append(ServerModel.of(self.loaded.path).server)
        return list(dict.fromkeys(found))

    async def server_entries(self, server: str, keys: KeyRing) -> list[ServerEntry]:
        """Return the models of a server, or one entry that says why there are none. Does not block."""
        module = await run_in_daemon_thread(lambda: import_module("cpuchat.backend.remote.backend"))  # httpx is slow
        backend: RemoteBackend = module.RemoteBackend(keys)
        try:
            kind, models = await backend.models(server)
        except CpuchatError as error:
            return [ServerEntry(ServerModel(server), problem=error.message, hint=error.hint)]
        if not models:
            return [ServerEntry(ServerModel(server), kind, problem="lists no models", hint="Load one on the server.")]
        return [ServerEntry(ServerModel(server, model.name), kind, model) for model in models]

    def catalog(self) -> Catalog:
        return load_catalog()

    def machine(self) -> Machine:
        """Return the machine as if the loaded model were unloaded."""
        from cpuchat.models.machine import this_machine

        return this_machine(self.settings, loaded=self.loaded)

    def header(self, path: Path) -> GGUFHeader:
        """Return the header, of all parts of a split model. Raises ModelDamaged, ModelNotFound."""
        return read_model(path)

    def deletion(self, model: LocalModel, loading: Source | None = None) -> Deletion:
        """Return what deleting the model would do. The files of the model that is loaded, or is `loading`, are kept,
        and those that may be its draft model, which is known by its name only."""
        in_use = [loading] if isinstance(loading, Path) else []
        if (loaded := self.loaded) is not None and not loaded.server:
            in_use += [Path(loaded.path)] + [
                other.path for other in self.library.local_models()
                if loaded.draft and (other.name, other.quantization) == (loaded.draft, loaded.draft_quantization)
            ]  # fmt: skip
        return self.library.deletion(model, in_use=in_use)

    def predictions(self, subjects: Mapping[str, Subject], machine: Machine) -> dict[str, Prediction]:
        """Predict fit and speed by the same keys, from the sizes alone; of models that are tuned, on the cores that
        they use."""
        from cpuchat.models.machine import TunedMachine
        from cpuchat.models.prediction import estimate, estimate_local

        tuned = TunedMachine(self.settings, machine, self.loaded)
        found: dict[str, Prediction] = {}
        for key, subject in subjects.items():
            match subject:
                case LocalModel(damaged=None) as model if model.size:
                    found[key] = estimate_local(model, tuned.of(model.path))
                case Download() as download if download.total:
                    kind = download.order.model.quantization
                    found[key] = estimate(download.total, machine, quantization=kind)
                case CatalogModel() as model if model.size:
                    found[key] = estimate_entry(model, machine)
                case _:
                    pass
        return found

    def known_here(self, catalog: Catalog, local: Iterable[LocalModel]) -> frozenset[str]:
        """Return the ids of the catalog's models that are local, in the quantization that the catalog would choose."""
        found = ((match_local(catalog, model), model.quantization) for model in local if model.damaged is None)
        # Headers do not name the groups of `Q2_0_G64`.
        return frozenset(one.id for one, kind in found if one and one.quantization.partition("_G")[0] == kind)

    def details(self, model: LocalModel | CatalogModel, machine: Machine) -> ModelDetails:
        """Return the details of one model: of one on this machine by its header, with the draft model that would be
        loaded beside it."""
        from cpuchat.models.drafts.candidates import own_head, usual_head
        from cpuchat.models.drafts.choice import predict_load
        from cpuchat.models.machine import TunedMachine

        if isinstance(model, CatalogModel):
            predicted = estimate_entry(model, machine) if model.size else None
            return ModelDetails(predicted, head=head_words(usual_head(model, machine)))
        tuned = TunedMachine(self.settings, machine, self.loaded)
        try:
            header = self.header(model.path)
            prediction, draft = predict_load(header, tuned, self.library)
        except (CpuchatError, OSError) as error:
            return ModelDetails(problem=str(error))
        options = tuned.settings(model.path).load_options()
        head = head_words(own_head(header, options, tuned.of(model.path)))
        is_link = model.source != "huggingface" and model.path.is_symlink()
        return ModelDetails(prediction, draft, head, paths.shown(model.path.resolve()) if is_link else "")
