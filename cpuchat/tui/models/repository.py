"""One repository: its downloads with size, fit and predicted speed, to download or load.

Reads Hugging Face, the disk and the machine for the repository screen. Blocks: call it in threads.

The state of one repository's models. Plain data, no widgets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content

from cpuchat.base.errors import AccessDenied, CpuchatError, HubError, NotOnHub
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.models.hub.repository import RepoModel, Repository, choose_repo_model, loadable, usual_first
from cpuchat.models.library.places import hub_cache
from cpuchat.present import downloads
from cpuchat.present import models as repository
from cpuchat.present.models import Known, key_of
from cpuchat.present.table import ListRow
from cpuchat.tui import keys
from cpuchat.tui.models.screen import choose
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from cpuchat.tui.widgets.download_line import DownloadLine
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.model_list import Labelled, ListScreen, ModelList

if TYPE_CHECKING:
    from cpuchat.models.drafts.choice import PlannedDraft
    from cpuchat.models.gguf.header import GGUFHeader
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
        on_way = {d.order.model.files: d for d in downloads if d.order.repo == self.repository.id}
        done = {key_of(d.order.model): Path(d.path) for d in on_way.values() if d.state == "done"}
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
                return key_of(choose_repo_model(self.repository, quantization))
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
        from cpuchat.models.prediction import predict, predict_like

        header, options = self.header(state.repository, model), self.services.settings.engine.load_options()
        beside = state.drafts[model.base] if model.base in state.drafts else self._draft(header)

        def expected(other: RepoModel, draft: GGUFHeader | None) -> Prediction:
            if other == model:
                return predict(header, options, state.machine, draft=draft)
            return predict_like(header, other.size, other.quantization, options, state.machine, draft=draft)

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


# What is done with the marked model.
_MARKED_ACTIONS = ("choose", "hold", "inspect")


class RepositoryScreen(ListScreen[Path | None]):
    """Returns a file to load, or None. Shows the listing first; fit and speed fill in."""

    CSS_PATH = "repository.tcss"
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("repository")
    KEYS: ClassVar = "repository"

    def __init__(self, services: Services, repo: str, *, quantization: str = "") -> None:
        """`quantization`: the one to select first."""
        super().__init__()
        self._services = services
        self._repo = repo
        self._reader = RepositoryReader(services, repo)
        self._quantization = quantization
        self._state: RepositoryState | None = None
        self._problem: CpuchatError | None = None
        self._judging = False
        self._enabled: list[bool | None] = []

    # What it is made of

    def compose(self) -> ComposeResult:
        with Horizontal(id="panes"):
            with Vertical(id="list") as pane:
                pane.border_title = Content(clean_line(self._repo))
                yield ModelList(id="models")
            with Vertical(id="about") as about:
                about.border_title = "About"
                yield Labelled(id="details")
        yield DownloadLine(self._services.downloading)
        yield KeyFooter()

    def on_mount(self) -> None:
        self._services.downloading.changed.subscribe(self, lambda _: self._show())
        self._ask()
        self._show()

    def on_screen_resume(self) -> None:
        if self._state is not None:  # a download may have been cancelled meanwhile
            self._state.arrived = self._reader.arrived(self._state.repository)
            self._show()

    # Asking the hub

    @work(exclusive=True, group="ask")
    async def _ask(self) -> None:
        try:
            self._state = await run_in_daemon_thread(self._reader.read)
        except CpuchatError as error:
            self._problem = error
            self._show()
        else:
            self.query_one("#list").border_subtitle = Content(repository.heading(self._state.repository))
            self._show(mark=self._marked_key or self._state.first_mark(self._quantization))

    def _judge(self) -> None:
        """Read the header of the selected model, one at a time: a large vocabulary is megabytes to download.

        Until they are selected, the others are estimated from those that were read.
        """
        model = self._state.to_judge(self._marked_key) if self._state is not None else None
        if self._state is not None and model is not None and not self._judging:
            self._judging = True
            self._read_header(self._state, model)

    @work(group="judge")
    async def _read_header(self, state: RepositoryState, model: RepoModel) -> None:
        try:
            state.judge(model, *await run_in_daemon_thread(lambda: self._reader.findings(state, model)))
        except CpuchatError as error:
            state.judged[repository.key_of(model)] = error
        self._judging = False
        self._show()

    # Showing

    @property
    def _marked_key(self) -> str:
        return self.query_one(ModelList).marked

    @property
    def _marked(self) -> Known | None:
        return next((known for known in self._known() if known.key == self._marked_key), None)

    def _known(self) -> list[Known]:
        if self._state is None:
            return []
        return self._state.known(self._services.downloading.all(), self._services.loaded_path)

    def _show(self, mark: str = "") -> None:
        if not self.has_widgets:
            return
        if self._state is not None:
            rows = repository.repository_rows(self._known()) or [ListRow(note="no GGUF files in this repository")]
        elif self._problem is not None:
            rows = [ListRow(note=f"! {clean_line(self._problem.message)}")]
        else:
            rows = [ListRow(note="Contacting Hugging Face…")]
        self.query_one(ModelList).show(rows, mark or self._marked_key)

    @on(ModelList.Marked)
    def _show_details(self) -> None:
        known = self._marked
        lines = (
            repository.repository_details(known, self._state.repository) if known is not None and self._state else []
        )
        if self._problem is not None:
            lines = [("problem", clean_line(self._problem.message)), ("what to do", clean_line(self._problem.hint))]
        self.query_one(Labelled).show(lines)
        enabled = [self.check_action(action, ()) for action in _MARKED_ACTIONS]
        if enabled != self._enabled:  # this lays the footer out again
            self._enabled = enabled
            self.refresh_bindings()
        self._judge()

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action not in _MARKED_ACTIONS or not self.is_mounted:
            return True
        known = self._marked
        if known is None:
            return None
        if action == "hold":
            return True if known.download is not None and known.download.state != "done" else None
        return True if known.model.kind == "model" or action == "choose" else None

    @on(ModelList.Chosen)
    @work(exclusive=True, group="choose")
    async def action_choose(self) -> None:
        known = self._marked
        if known is None or self._state is None:
            return
        if known.path is not None:
            if known.model.kind == "model":
                await choose(self, self._services, known.path)
        elif known.download is not None and known.download.state in RUNNING:
            self.action_downloads()
        elif known.download is not None:
            self._services.downloading.resume(known.download.id)
        elif reason := self._reason_against(known):
            self.notify(reason, severity="warning", markup=False)
        elif await self._wanted(known):
            self._start(known.model, self._state.repository)

    def _start(self, model: RepoModel, repository: Repository) -> None:
        try:
            self._services.downloading.start(repository.id, repository.revision, model, repository.newest_at)
        except CpuchatError as error:
            self.notify(clean_line(str(error)), severity="error", markup=False)

    @staticmethod
    def _reason_against(known: Known) -> str:
        """Return why a download would certainly fail, "" when it may succeed."""
        if not known.model.complete:
            return "Parts of this model are missing in the repository. Choose another model."
        return clean_line(str(known.problem)) if isinstance(known.problem, AccessDenied) else ""

    async def _wanted(self, known: Known) -> bool:
        """Ask before downloading what cannot be loaded here."""
        if known.prediction is None or known.prediction.verdict != "too large":
            return True
        question = f"{downloads.download_title(known.model)}: {known.prediction.explained}. Download anyway?"
        return bool(
            await self.app.push_screen_wait(ConfirmScreen("Too large", question, "Download", "Cancel", danger=False))
        )

    def action_hold(self) -> None:
        known = self._marked
        if known is not None and known.download is not None:
            self._services.downloading.hold(known.download.id)

    @work
    async def action_downloads(self) -> None:
        path = await self._services.navigation.downloads()
        if path is not None:
            self.dismiss(path)

    def action_inspect(self) -> None:
        known, state = self._marked, self._state
        if known is not None and state is not None and known.model.kind == "model":
            title = f"{self._repo} · {downloads.download_title(known.model)}"
            read = lambda: self._reader.header(state.repository, known.model)  # noqa: E731
            self._services.navigation.inspection(title, read)

    def action_again(self) -> None:
        self._problem, self._state = None, None
        self._show()
        self._ask()
