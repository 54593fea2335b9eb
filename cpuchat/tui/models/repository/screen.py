"""One repository: its models with size, fit and predicted speed, to download or load."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content

from cpuchat.daemon_thread import run_in_daemon_thread
from cpuchat.errors import AccessDenied, CpuchatError
from cpuchat.models.downloads.state import RUNNING
from cpuchat.models.hub.repository import RepoModel, Repository
from cpuchat.present import downloads, repository
from cpuchat.present.repository import Known
from cpuchat.present.rows import ListRow
from cpuchat.text import clean_line
from cpuchat.tui import keys
from cpuchat.tui.models.choice import choose
from cpuchat.tui.models.repository.reader import RepositoryReader
from cpuchat.tui.models.repository.state import RepositoryState
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from cpuchat.tui.widgets.download_line import DownloadLine
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.labelled import Labelled
from cpuchat.tui.widgets.list_screen import ListScreen
from cpuchat.tui.widgets.model_list import ModelList

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
            rows = repository.rows(self._known()) or [ListRow(note="no GGUF files in this repository")]
        elif self._problem is not None:
            rows = [ListRow(note=f"! {clean_line(self._problem.message)}")]
        else:
            rows = [ListRow(note="Contacting Hugging Face…")]
        self.query_one(ModelList).show(rows, mark or self._marked_key)

    @on(ModelList.Marked)
    def _show_details(self) -> None:
        known = self._marked
        lines = repository.details(known, self._state.repository) if known is not None and self._state else []
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
        question = f"{downloads.title(known.model)}: {known.prediction.explained}. Download anyway?"
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
            title = f"{self._repo} · {downloads.title(known.model)}"
            read = lambda: self._reader.header(state.repository, known.model)  # noqa: E731
            self._services.navigation.inspection(title, read)

    def action_again(self) -> None:
        self._problem, self._state = None, None
        self._show()
        self._ask()
