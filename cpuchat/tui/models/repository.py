"""One repository on Hugging Face: its models with size, fit and predicted speed, to download or load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from textual import on, work
from textual.app import ComposeResult
from textual.content import Content

from cpuchat.base.errors import AccessDenied, CpuchatError, HubError, ModelUnsupported, NotOnHub
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.models.hub.repository import RepoModel, Repository, choose_repo_model, loadable, usual_first
from cpuchat.models.library.places import hub_cache
from cpuchat.present import downloads
from cpuchat.present import models as words
from cpuchat.present.models import RepositoryEntry
from cpuchat.present.table import ListRow
from cpuchat.tui.models.screen import choose
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.download_line import DownloadLine
from cpuchat.tui.widgets.model_list import ModelList, PanesScreen

if TYPE_CHECKING:
    from cpuchat.models.drafts.choice import PlannedDraft
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.models.machine import Machine
    from cpuchat.models.prediction import Prediction


@dataclass
class RepositoryState:
    """The state of a repository. `here`: local models by key. `judged`: results of reading a header, by key;
    `expected`: the predictions of models whose header was not read, by that of another quantization; `drafts`: by
    `RepoModel.base`; `arrived`: bytes by key."""

    repository: Repository
    machine: Machine
    here: dict[str, Path]
    judged: dict[str, Prediction | CpuchatError] = field(default_factory=dict)
    expected: dict[str, Prediction] = field(default_factory=dict)
    drafts: dict[str, PlannedDraft | None] = field(default_factory=dict)
    arrived: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, services: Services, repo: str) -> RepositoryState:
        """Read what the hub lists, what is here, and the machine; blocks. Raises HubError and its kinds."""
        from cpuchat.models.machine import this_machine

        repository = services.hub.repository(repo)
        machine = this_machine(services.settings, loaded=services.conversation.model)
        here: dict[str, Path] = {}
        for model in services.library.local_models():
            if model.repo.lower() == repo.lower() and (not model.damaged or model.kind == "head"):
                # The cache keeps files under snapshots/REVISION/, in the folders that they have in the repository.
                _, snapshots, inside = model.path.as_posix().rpartition("/snapshots/")
                if snapshots:
                    here[inside.partition("/")[2]] = model.path
        state = cls(repository, machine, here)
        state.read_arrived()
        return state

    def read_arrived(self) -> None:
        """Read how many bytes of each model earlier downloads left in the cache; quick."""
        from cpuchat.models.downloads.hf_cache import bytes_here

        self.arrived = {}
        for model in self.repository.models:
            with contextlib.suppress(HubError):  # without a hash it can't be downloaded
                self.arrived[model.key] = bytes_here(hub_cache(), self.repository.id, model.files)

    def entries(self, downloads: Iterable[Download], loaded: Path | None) -> list[RepositoryEntry]:
        """Return all models, in the order of the repository. Those whose header was not read are predicted from another
        quantization of the same model, else from their size."""
        from cpuchat.models.prediction import estimate

        on_way = {d.order.model.files: d for d in downloads if d.order.repo == self.repository.id}
        done = {d.order.model.key: Path(d.path) for d in on_way.values() if d.state == "done"}
        here, denied = {**self.here, **done}, self._denied

        def entry(model: RepoModel) -> RepositoryEntry:
            key = model.key
            path, judged = here.get(key), self.judged.get(key, denied)
            problem = judged if isinstance(judged, CpuchatError) else None
            prediction = judged if not isinstance(judged, CpuchatError) else None
            if prediction is None and model.kind == "model" and self.judged:  # else no header was asked for yet
                known = self.expected.get(key)
                prediction = known or estimate(model.size, self.machine, quantization=model.quantization)
            draft = self.drafts.get(model.base) if model.kind == "model" else None
            is_loaded, arrived = path is not None and path == loaded, self.arrived.get(key, 0)
            on_its_way = on_way.get(model.files)
            return RepositoryEntry(model, path, arrived, is_loaded, on_its_way, prediction, draft, problem)

        return [entry(model) for model in self.repository.models]

    def to_judge(self, key: str) -> RepoModel | None:
        """Return the model of this key if its header was not read yet and is worth it."""
        if self._denied is not None or key in self.judged:
            return None
        whole = (model for model in self.repository.models if model.kind == "model" and model.complete)
        return next((model for model in whole if model.key == key), None)

    @property
    def _denied(self) -> AccessDenied | None:
        """Return why no file of this repository can be read: access is denied for all of them."""
        return next((error for error in self.judged.values() if isinstance(error, AccessDenied)), None)

    def first_mark(self, quantization: str = "") -> str:
        """Return the key to select: the one with `quantization`, one on this machine, or the usual one; "" for none."""
        if quantization:
            with contextlib.suppress(NotOnHub):
                return choose_repo_model(self.repository, quantization).key
        chat = usual_first(loadable(self.repository.models)) or list(self.repository.models)
        keys = [model.key for model in chat]
        return next((key for key in keys if key in self.here), keys[0] if keys else "")


def predict_model(
    services: Services, state: RepositoryState, model: RepoModel
) -> tuple[dict[str, Prediction], PlannedDraft | None]:
    """Predict from the header of `model`: return predictions by key, its own and those of its other
    quantizations, and the draft model counted in them. Raises as `Hub.header`, and ModelUnsupported."""
    from cpuchat.models.drafts.choice import planned_draft
    from cpuchat.models.prediction import predict, predict_like
    from cpuchat.models.support import check_supported

    header, options = services.hub.header(state.repository, model), services.settings.engine.load_options()
    check_supported(header)
    if model.base in state.drafts:
        beside = state.drafts[model.base]
    else:
        wanted = services.settings.speculation.wanted_draft
        beside = planned_draft(header, wanted, services.library, services.hub)

    def expected(other: RepoModel, draft: GGUFHeader | None) -> Prediction:
        if other == model:
            return predict(header, options, state.machine, draft=draft)
        return predict_like(header, other.size, other.quantization, options, state.machine, draft=draft)

    predictions: dict[str, Prediction] = {}
    for other in state.repository.models:
        if other.base == model.base and other.kind == "model":
            look = expected(other, beside.header if beside is not None else None)
            # A draft model that is not downloaded does not make a model too large.
            alone = beside is not None and not beside.here and look.needed > look.available
            predictions[other.key] = expected(other, None) if alone else look
    return predictions, beside


class RepositoryScreen(PanesScreen[Path | None], keys="repository"):
    """Returns a file to load, or None. Shows the listing first (`state`, or the `problem`); fit and speed fill in."""

    def __init__(self, services: Services, repo: str, *, quantization: str = "") -> None:
        """`quantization`: the one to select first."""
        super().__init__()
        self._services, self._quantization = services, quantization
        self._repo = self.list_title = repo
        self.state: RepositoryState | None = None
        self.problem: CpuchatError | None = None
        self._judging = False

    def compose_below(self) -> ComposeResult:
        yield DownloadLine(self._services.downloading)

    def on_mount(self) -> None:
        self._services.downloading.changed.subscribe(self, lambda _: self._show())
        self._ask()
        self._show()

    def on_screen_resume(self) -> None:
        if self.state is not None:  # a download may have been cancelled meanwhile
            self.state.read_arrived()
            self._show()

    # Asking the hub

    @work(exclusive=True, group="ask")
    async def _ask(self) -> None:
        try:
            self.state = await self._services.ask_hub(lambda: RepositoryState.read(self._services, self._repo))
        except CpuchatError as error:
            self.problem = error
            self._show()
        else:
            self.query_one("#list").border_subtitle = Content(words.heading(self.state.repository))
            self._show(mark=self.marked_key or self.state.first_mark(self._quantization))

    async def _read_header(self, state: RepositoryState, model: RepoModel) -> None:
        try:
            found, draft = await run_in_daemon_thread(lambda: predict_model(self._services, state, model))
        except CpuchatError as error:
            state.judged[model.key] = error
        else:
            state.judged[model.key] = found[model.key]
            state.expected |= found
            state.drafts[model.base] = draft
        self._judging = False
        self._show()

    # Showing

    @property
    def entries(self) -> list[RepositoryEntry]:
        if self.state is None:
            return []
        return self.state.entries(self._services.downloading.all(), self._services.loaded_path)

    @property
    def marked(self) -> RepositoryEntry | None:
        return next((entry for entry in self.entries if entry.model.key == self.marked_key), None)

    def _show(self, mark: str = "") -> None:
        if not self.has_widgets:
            return
        if self.state is not None:
            rows = words.repository_rows(self.entries) or [ListRow(note="no GGUF files in this repository")]
        elif self.problem is not None:
            rows = [ListRow(note=f"! {clean_line(self.problem.message)}")]
        else:
            rows = [ListRow(note="Contacting Hugging Face…")]
        self.listed.show(rows, mark or self.marked_key)

    @on(ModelList.Marked)
    def _show_details(self) -> None:
        entry = self.marked
        rows = words.repository_details(entry, self.state.repository) if entry and self.state else []
        if self.problem is not None:
            rows = [("what to do", self.problem.hint)]  # the list says what happened
        self.show_details(rows, "About")
        self.refresh_bindings()
        # One header at a time: a large vocabulary is megabytes to download. Until they are selected, the others are
        # estimated from those that were read.
        model = self.state.to_judge(self.marked_key) if self.state is not None else None
        if self.state is not None and model is not None and not self._judging:
            self._judging = True
            self.run_worker(self._read_header(self.state, model), group="judge")

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action not in ("choose", "hold") or not self.is_mounted:
            return True
        entry = self.marked
        if entry is None or action == "choose":
            return entry is not None
        return entry.download is not None and entry.download.state != "done"

    @on(ModelList.Chosen)
    @work(exclusive=True, group="choose")
    async def action_choose(self) -> None:
        entry = self.marked
        if entry is None or self.state is None:
            return
        if entry.path is not None:
            if entry.model.kind == "model":
                await choose(self, self._services, entry.path)
        elif entry.download is not None and entry.download.state in RUNNING:
            self.notify("It is being downloaded. Space pauses it.")
        elif entry.download is not None:
            self._services.downloading.resume(entry.download.id)
        else:
            if (model := self.state.to_judge(entry.model.key)) is not None:
                await self._read_header(self.state, model)
                entry = self.marked or entry
            if reason := entry.reason_against_download:
                self.warn(reason)
                return
            title, reason, look = "", "", entry.prediction
            if isinstance(entry.problem, ModelUnsupported):
                title, reason = "Unsupported", entry.problem.message
            elif look is not None and look.needed > look.available:
                title, reason = look.verdict.capitalize(), f"{downloads.download_title(entry.model)}: {look.explained}."
            question = clean_line(f"{reason} Download anyway?")
            if title and not await self.confirm(title, question, "Download", danger=False):
                return
            repository = self.state.repository
            try:
                self._services.downloading.start(repository.id, repository.revision, entry.model, repository.newest_at)
            except CpuchatError as error:
                self.notify(clean_line(str(error)), severity="error", markup=False)

    def action_hold(self) -> None:
        entry = self.marked
        if entry is not None and entry.download is not None:
            self._services.downloading.hold(entry.download.id)

    def action_again(self) -> None:
        self.problem, self.state = None, None
        self._show()
        self._ask()
