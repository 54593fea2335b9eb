"""The models on this machine: listing, resolving, verifying, deleting."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from cpuchat import paths
from cpuchat.errors import ModelDamaged, ModelNotFound
from cpuchat.models.library.deleting import Deletion, plan_deletion
from cpuchat.models.library.model import LocalModel
from cpuchat.models.library.places import (
    DEMO_FILES,
    Place,
    all_places,
    hub_cache,
    is_inside,
    model_files,
    models_in,
    repo_folder,
)
from cpuchat.models.library.recent import RecentModels
from cpuchat.models.library.resolving import resolve
from cpuchat.models.library.summaries import SummaryCache
from cpuchat.models.library.usage import UsageLog, UsageSnapshot
from cpuchat.models.library.verifying import Progress, Verification, check_content


class Library:
    """The models on this machine. Reading takes a while with many files: not for the UI thread."""

    def __init__(self, settings_folders: Iterable[Path | str] = (), cache: Path | None = None) -> None:
        """`settings_folders` are the user's; `cache` replaces the Hugging Face cache."""
        self.folders = (*(paths.expanded(folder) for folder in settings_folders), paths.made_models_dir())
        self.cache = cache or hub_cache()
        self._summaries = SummaryCache()

    def places(self, beside: Path | None = None) -> Iterator[Place]:
        """Yield every file that may be a model, with those in the folder of the model `beside`."""
        files = models_in(beside.parent) if beside is not None else []
        return all_places(self.cache, self.folders, [*RecentModels().files(), *files])

    def at(self, path: Path) -> LocalModel | None:
        """Return the model whose first file is `path`, wherever that is; None when it is something else."""
        return self._summaries.model(Place(path=path, source="folder", root=path.parent))

    def opened(self, path: Path) -> None:
        """Record that `path` was loaded: it is listed from now on, also if it lies in no folder that is searched."""
        path = path.absolute()
        if not any(is_inside(path.parent, folder) for folder in (*self.folders, self.cache, paths.demo_dir())):
            RecentModels().add(path)

    def local_models(self, beside: Path | None = None) -> list[LocalModel]:
        """Return all models: demo first, then the cache, then folders, then those in the folder of the model `beside`,
        wherever that is; damaged ones included.
        """
        self._summaries.refresh()
        found = [self._summaries.model(place) for place in self.places(beside)]
        self._summaries.save()
        usage = UsageLog().read()
        return [_with_usage(model, usage) for model in found if model is not None]

    def resolve(self, spec: str) -> Path:
        """Return the file that `spec` names: a path; "demo", "demo-q4" or "demo-draft"; "owner/name" or
        "owner/name:QUANT" of the Hugging Face cache; or the name of a model file that the library knows.

        Raises:
            ModelNotFound: nothing matches; the hint names what is close and what to do.
        """
        return resolve(spec, self.cache, self.places, self._summaries)

    def spec(self, path: Path) -> str:
        """Return a name by which `resolve` finds the model at `path`, also after an update of its repository:
        "owner/name:QUANT" in the Hugging Face cache, the name of a demo model, else the path.
        """
        for name, file in DEMO_FILES.items():
            if path == paths.demo_dir() / file:
                return name
        place = next((one for one in self.places() if one.repo and one.path == path), None)
        model = self._summaries.model(place) if place is not None else None
        if model is not None:
            name = f"{model.repo}:{model.quantization}"
            with contextlib.suppress(ModelNotFound):  # two files that their headers call alike
                if self.resolve(name) == path:
                    return name
        return str(path)

    def verify(self, model: LocalModel, progress: Progress = lambda done, total: None) -> Verification:
        """Read the whole model and compare it with the checksum under which the Hugging Face cache stores it.

        The result is remembered while the files stay unchanged: `local_models` marks damaged ones.
        """
        parts = model_files(model.path)
        try:
            state, words = check_content(parts, progress)
        except ModelDamaged as error:
            return Verification(model=model, state="damaged", words=model.damaged or error.message)
        if state != "unchecked":
            self._summaries.set_checksum_error(parts, words if state == "damaged" else None)
            self._summaries.save()
        now = self._summaries.model(Place(path=model.path, source=model.source, root=model.path.parent))
        # By its header, or a partial download; a head is intact but can't be loaded.
        if state != "damaged" and now is not None and now.damaged and now.kind == "model":
            state, words = "damaged", now.damaged
        return Verification(model=model, state=state, words=words)

    def deletion(self, model: LocalModel, in_use: Collection[Path] = ()) -> Deletion:
        """Plan the deletion of `model`, for `delete`. `in_use` are the files of loaded models: they stay."""
        return plan_deletion(model, self._root(model), in_use)

    def _root(self, model: LocalModel) -> Path | None:
        """Return the user's folder or the cached repository that a model belongs to."""
        if model.source == "huggingface":
            return repo_folder(self.cache, model.repo)
        return next((folder for folder in self.folders if is_inside(model.path.parent, folder)), None)


def _with_usage(model: LocalModel, usage: UsageSnapshot) -> LocalModel:
    known = usage.of(model_files(model.path))
    return msgspec.structs.replace(
        model, last_used=known.used, measured_tok_s=known.plain_tok_s, drafted_tok_s=known.drafted_tok_s
    )
