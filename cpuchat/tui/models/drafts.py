"""Draft models for a model and their predicted speed-up: use one, and download it first if needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on, work
from textual.app import App, ComposeResult

from cpuchat.base.errors import CpuchatError, HubError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.models.catalog import load_catalog
from cpuchat.models.drafts.candidates import DraftCandidate, candidates, check, model_of, recommended
from cpuchat.models.drafts.choice import ChosenDrafts, choose_draft, heads_of, local_heads
from cpuchat.models.drafts.pairing import Compatibility
from cpuchat.models.gguf.header import known_as, read_model
from cpuchat.models.library.places import LocalModel
from cpuchat.models.ollama import ollama_name
from cpuchat.present import models
from cpuchat.present.table import ListRow
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.download_line import DownloadLine
from cpuchat.tui.widgets.model_list import ModelList, PanesScreen

if TYPE_CHECKING:
    from cpuchat.models.downloads.state import Download
    from cpuchat.models.gguf.header import GGUFHeader


async def use_when_here(app: App[Any], services: Services, download: Download, target: Path) -> None:
    """Wait for `download`, through pauses and retries, then use it, and reload `target` if that is still the model and
    nothing runs."""
    done = await services.downloading.arrival(download.id)
    if done is None:
        return  # the user has taken it off the list
    name = clean_line(done.order.model.name)
    try:
        await run_in_daemon_thread(lambda: choose_draft(target, done.path, services.library))
    except (CpuchatError, OSError) as error:
        text = clean_line(f"{name} cannot be the draft model. {error}")
        app.notify(text, title="Draft model", severity="error", timeout=10, markup=False)
        return
    services.use_draft_model(target, done.path)
    model = services.conversation.model
    if model is not None and Path(model.path) == target and not services.session.busy:
        app.notify(f"{name} is now the draft model.", markup=False)
        services.session.load(target)
    else:
        app.notify(f"{name} will be the draft model of {known_as(target)} from its next load.", markup=False)


class DraftModelsScreen(PanesScreen[Path | None], keys="draft_models"):
    """Draft models for `model`; verdicts fill in one by one.

    Returns its file if it is to be loaded, or loaded again, else None."""

    def __init__(self, services: Services, model: LocalModel) -> None:
        super().__init__()
        self._services, self._target = services, model.path
        is_loaded = services.loaded_path == model.path
        self._loaded = services.conversation.model if is_loaded else None
        self.list_title = f"Draft models for {model.name}"
        self.candidates: dict[str, DraftCandidate] | None = None
        self.problem = ""
        self._folds = True

    def compose_below(self) -> ComposeResult:
        yield DownloadLine(self._services.downloading)

    def on_mount(self) -> None:
        self._show()
        self._read()

    @work(exclusive=True, group="read")
    async def _read(self) -> None:
        try:
            target, listed = await run_in_daemon_thread(self._find)
        except (CpuchatError, OSError) as error:
            self.candidates, self.problem = {}, str(error)
            self._show()
            return
        self._put(*listed)
        hub = self._services.hub
        for candidate in sorted(listed, key=lambda candidate: candidate.where == "hub"):  # it may let all others wait
            self._put(await run_in_daemon_thread(partial(check, candidate, target, hub=hub)))
        for candidate in await run_in_daemon_thread(lambda: self._heads_on_hub(target, listed)):
            self._put(candidate)
            self._put(await run_in_daemon_thread(partial(check, candidate, target, hub=hub)))

    def _find(self) -> tuple[GGUFHeader, list[DraftCandidate]]:
        """Return the target's header and the candidates, unchecked; blocks.

        Raises ModelNotFound, ModelDamaged: the file of the model is gone or has changed."""
        from cpuchat.models.drafts.candidates import target_costs
        from cpuchat.models.machine import machine_for

        target = read_model(self._target)
        costs = target_costs(target.path)
        if self._loaded is not None and self._loaded.pass_ms:  # measured with the cores in use
            costs = costs._replace(pass_ms=self._loaded.pass_ms)
        here = self._services.library.local_models(beside=target.path)
        machine = machine_for(target.path, self._services.settings, self._services.conversation.model)
        found = candidates(target, here, load_catalog(), costs, machine)
        return target, [*local_heads(target, here, costs, machine), *found]

    def _heads_on_hub(self, target: GGUFHeader, found: Iterable[DraftCandidate]) -> list[DraftCandidate]:
        """Return the draft heads in the target's repository that are not `found` here; [] when it cannot be reached."""
        local = self._services.library.local_models()
        repo = next((model.repo for model in local if model.path == target.path), "")
        with contextlib.suppress(HubError):
            return heads_of(self._services.hub.repository(repo), found) if repo else []
        return []

    def _is_loaded(self, candidate: DraftCandidate) -> bool:
        name = (candidate.path is not None and ollama_name(candidate.path)) or candidate.name
        if self._loaded is None:
            return False
        return bool(name) and (name, candidate.quantization) == (self._loaded.draft, self._loaded.draft_quantization)

    def _put(self, *candidates: DraftCandidate) -> None:
        self.candidates = (self.candidates or {}) | {candidate.spec: candidate for candidate in candidates}
        self._show()

    @property
    def marked(self) -> DraftCandidate | None:
        return (self.candidates or {}).get(self.marked_key)

    def _show(self) -> None:
        listed, candidates = self.listed, self.candidates
        if candidates is None:
            listed.show([ListRow(note="Reading…")])
            return
        order = lambda one: (one.fits is False, one.where == "hub", -one.expected.mean)  # noqa: E731 - the best here first
        candidates = {one.spec: one for one in sorted(candidates.values(), key=order)}
        loaded = next((key for key, candidate in candidates.items() if self._is_loaded(candidate)), "")
        chosen = self._services.settings.speculation.wanted_draft or ChosenDrafts().of(self._target) or models.AUTO
        best = recommended(candidates.values())
        mark = listed.marked if listed.moved else loaded or (best.spec if best else next(iter(candidates), ""))
        listed.show(models.draft_rows(candidates, loaded, chosen, folds=self._folds), mark)
        if not candidates and not self.problem:
            self.query_one("#list").border_subtitle = "no smaller model here, none in the catalog"

    @on(ModelList.Marked)
    def _show_details(self) -> None:
        candidate = self.marked
        if not self.marked_key:
            return
        is_loaded = candidate is not None and self._is_loaded(candidate)
        rows = models.draft_details(self.marked_key, candidate, is_loaded=is_loaded)
        problem = [("problem", self.problem)] if self.problem else []
        title = candidate.name if candidate is not None else "About"
        self.show_details([*problem, *rows], title)

    @on(ModelList.Chosen)
    def action_use(self) -> None:
        match self.marked:
            case DraftCandidate(verdict=Compatibility(ok=False, reason=reason), name=name):
                self.warn(f"{name} cannot be the draft model: {reason}.")
            case DraftCandidate(path=None) as candidate:
                self._fetch(candidate)
            case DraftCandidate(verdict=None, name=name):
                self.warn(f"{name} is still being checked.")
            case _ if self.marked_key == models.MORE:
                self._folds = False
                self._show()
            case _ if self.marked_key:
                self._services.use_draft_model(self._target, self.marked_key)
                self.dismiss(self._target)

    @work(exclusive=True, group="fetch")
    async def _fetch(self, candidate: DraftCandidate) -> None:
        """Start the download. The app does the rest: this screen may be closed."""
        try:
            repository = await self._services.ask_hub(lambda: self._services.hub.repository(candidate.repo))
            model = model_of(repository, candidate)
            download = self._services.downloading.start(repository.id, repository.revision, model, repository.newest_at)
        except CpuchatError as error:
            self.warn(str(error))
            return
        work = use_when_here(self.app, self._services, download, self._target)
        self.app.run_worker(work, group="drafts", name="drafts")
        self.notify(f"{clean_line(model.name)} will be used once downloaded.", markup=False)
