"""Draft models for the loaded model and their predicted speed-up; Enter uses one, and downloads it first if needed.

Sets the draft model: at once for one on this machine, else after its download.

Measures what a draft model gains for the loaded model, and asks whether to use it.

Reads headers, measurements and Hugging Face for the screen of draft models. Blocks: call it in threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Label

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, HubError, Interrupted
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.config.settings import Changes, with_changes
from cpuchat.models.drafts.candidates import Candidate, candidates, check, measured_acceptance, model_of, recommended
from cpuchat.models.drafts.choice import ChosenDrafts, choose_draft, heads_of, local_heads
from cpuchat.present import models
from cpuchat.present.table import ListRow, table
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.tui import keys
from cpuchat.tui.models.reader import ModelsReader
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.download_line import DownloadLine
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.model_list import Labelled, ListScreen, ModelList

if TYPE_CHECKING:
    from cpuchat.bench.run import Bench, PairResult
    from cpuchat.models.downloads.state import Download
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.models.hub.repository import RepoModel, Repository


def use(services: Services, target: Path, wanted: str, depth: int | None = None) -> None:
    """Make `wanted` (the path of a file, models.AUTO or NONE) the draft model of `target` from its next load on.

    One that the settings have for all models no longer counts. Drafting with a model is turned on if the settings have
    it off. `depth` None leaves the draft depth.
    """
    conversation = services.conversation
    ChosenDrafts().put(target, wanted)
    changes: Changes = {"speculation": {}}
    if conversation.settings.speculation.draft_model:
        changes["speculation"]["draft_model"] = ""
    if wanted != models.NONE and conversation.settings.speculation.drafters not in ("auto", "draft"):
        changes["speculation"]["drafters"] = "auto"
    if depth is not None:
        changes["speculation"]["depth"] = depth
    if changes["speculation"]:
        conversation.settings = with_changes(conversation.settings, changes)
        services.save_settings(changes)


async def use_when_here(app: App[Any], services: Services, download: Download, target: Path) -> None:
    """Wait for `download`, through pauses and retries, then use it, and reload `target` if that is still the model and
    nothing runs."""
    done = await services.downloading.arrival(download.id)
    if done is None:
        return  # the user has taken it off the list
    name, chat = clean_line(done.order.model.name), services.chat
    try:
        await run_in_daemon_thread(lambda: choose_draft(target, done.path, services.library, heads=True))
    except (CpuchatError, OSError) as error:
        text = clean_line(f"{name} cannot be the draft model. {error}")
        app.notify(text, title="Draft model", severity="error", timeout=10, markup=False)
        return
    use(services, target, done.path)
    model = services.conversation.model
    if model is not None and Path(model.path) == target and not chat.busy:
        app.notify(f"{name} is now the draft model.", markup=False)
        chat.load_model(target)
    else:
        app.notify(f"{name} will be the draft model of {clean_line(target.stem)} from its next load.", markup=False)


_RIGHT = (1, 2, 3, 4, 5, 6)


class MeasurePairScreen(Dismissable[int | None], ModalScreen[int | None]):
    """Returns the draft depth to use (0: adaptive) if the draft model is to be used, else None.

    A separate worker process measures; the loaded model stays loaded.
    """

    CSS_PATH = "measure.tcss"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("measure_pair")

    def __init__(self, services: Services, target: Path, draft: Path) -> None:
        super().__init__()
        self._services = services
        self._target, self._draft = target, draft
        self._bench: Bench | None = None
        self.result: PairResult | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = Content(clean_line(f"{self._draft.stem} drafting for {self._target.stem}"))
            dialog.border_subtitle = "Esc stops"
            yield Label("Starting…", id="figures", markup=False)

    def on_mount(self) -> None:
        self._measure()

    @work(exclusive=True)
    async def _measure(self) -> None:
        from cpuchat.bench.run import pair_bench

        running = self._bench = pair_bench(
            self._target, self._draft, self._services.settings, paths.bench_dir(), self._show
        )
        try:
            await running.run()
        except Interrupted:
            self.dismiss(None)
            return
        except (CpuchatError, OSError) as error:
            self._fail(str(error))
            return
        finally:
            self._bench = None
        self._finish(running)

    def _show(self) -> None:
        """Show the figures so far, and how far the measurement is."""
        from cpuchat.bench.results import report_of
        from cpuchat.bench.run import pair_result
        from cpuchat.present import bench as words

        running = self._bench
        if running is None or not self.has_widgets:
            return
        rows = words.pair_rows(pair_result(report_of(running.journal, running.failed)))
        lines = table([words.PAIR_HEADINGS, *rows], right=_RIGHT) if rows else []
        progress = running.progress
        bar = words.progress_bar(progress.done, progress.total, progress.seconds_left, progress.what)
        self._write([*lines, "", bar] if lines else [bar])

    def _finish(self, running: Bench) -> None:
        from cpuchat.bench.results import report_of
        from cpuchat.bench.run import pair_result
        from cpuchat.present import bench as words

        found = pair_result(report_of(running.journal, running.failed))
        if not found.kinds:
            self._fail(next(iter(running.failed.values()), words.pair_verdict(found)))
            return
        self.result = found
        lines = table([words.PAIR_HEADINGS, *words.pair_rows(found)], right=_RIGHT)
        self._write([*lines, "", words.pair_verdict(found)])
        self.query_one("#dialog").border_subtitle = "Enter uses it · Esc closes"

    def _fail(self, problem: str) -> None:
        self._write([f"Not measured. {clean_line(problem)}"])
        self.query_one("#dialog").border_subtitle = "Esc closes"

    def _write(self, lines: list[str]) -> None:
        if self.has_widgets:
            self.query_one("#figures", Label).update("\n".join(lines))

    def action_keep(self) -> None:
        if self.result is not None:
            self.dismiss(self.result.depth)

    async def action_cancel(self) -> None:
        if self._bench is not None:
            self.query_one("#dialog").border_subtitle = "Stopping…"
            await self._bench.stop()
        else:
            self.dismiss(None)


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
        from cpuchat.models.drafts.candidates import target_costs
        from cpuchat.models.machine import machine_for

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
        here = self.models.local_models()
        repo = next((model.repo for model in here if model.path == target.path), "")
        if not repo:
            return []
        with contextlib.suppress(HubError):
            return heads_of(self.services.hub.repository(repo), found)
        return []

    def is_loaded(self, name: str, quantization: str) -> bool:
        """Return whether it is the loaded draft model."""
        return bool(name) and (name, quantization) == (self.loaded.draft, self.loaded.draft_quantization)

    def check(self, candidate: Candidate, target: GGUFHeader) -> Candidate:
        """Return the candidate with its verdict, or why there is none; for a remote one, its header is requested."""
        return check(candidate, target, hub=self.services.hub)

    def to_download(self, candidate: Candidate) -> tuple[Repository, RepoModel]:
        """Find its file. Raises HubError and its kinds."""
        repository = self.services.hub.repository(candidate.repo)
        return repository, model_of(repository, candidate)


class DraftModelsScreen(ListScreen[Path | None]):
    """Returns the loaded model's file if it has to be loaded again, else None. Verdicts fill in one by one."""

    CSS_PATH = "draft_models.tcss"
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("draft_models")
    KEYS: ClassVar = "draft_models"

    def __init__(self, services: Services, reader: DraftReader | None = None) -> None:
        super().__init__()
        self._services = services
        self._reader = reader or DraftReader.of(services)
        self._found: dict[str, Candidate] | None = None
        self._problem = ""

    def compose(self) -> ComposeResult:
        with Horizontal(id="panes"):
            with Vertical(id="list") as pane:
                pane.border_title = Content(clean_line(f"Draft models for {self._reader.loaded.name}"))
                yield ModelList(id="candidates")
            with Vertical(id="about"):
                yield Labelled(id="details")
        yield DownloadLine(self._services.downloading)
        yield KeyFooter()

    def on_mount(self) -> None:
        self._show()
        self._find(self._reader)

    # Looking

    @work(exclusive=True, group="find")
    async def _find(self, reader: DraftReader) -> None:
        try:
            target, found = await run_in_daemon_thread(reader.candidates)
        except (CpuchatError, OSError) as error:
            self._found, self._problem = {}, str(error)
            self._show()
            return
        self._found = {one.spec: one for one in found}
        self._show()
        for one in sorted(found, key=lambda one: one.where == "hub"):  # the hub may let all others wait
            self._found[one.spec] = await run_in_daemon_thread(partial(reader.check, one, target))
            self._show()
        for one in await run_in_daemon_thread(lambda: reader.heads_on_hub(target, found)):
            self._found[one.spec] = one
            self._show()
            self._found[one.spec] = await run_in_daemon_thread(partial(reader.check, one, target))
            self._show()

    # Showing

    def _show(self) -> None:
        listed = self.query_one(ModelList)
        if self._found is None:
            listed.show([ListRow(note="Reading…")])
            return
        found = self._found
        loaded = next((key for key, one in found.items() if self._reader.is_loaded(one.name, one.quantization)), "")
        wanted = (
            self._services.settings.speculation.wanted_draft
            or ChosenDrafts().of(Path(self._reader.loaded.path))
            or models.AUTO
        )
        mark = listed.marked if listed.moved else loaded or next(iter(found), "")
        listed.show(models.draft_rows(found, loaded, wanted), mark)
        if not found and not self._problem:
            self.query_one("#list").border_subtitle = "no smaller model here, none in the catalog"

    @on(ModelList.Marked)
    def _show_details(self) -> None:
        key = self.query_one(ModelList).marked
        if not key:
            return
        one = (self._found or {}).get(key)
        is_loaded = one is not None and self._reader.is_loaded(one.name, one.quantization)
        is_best = one is not None and one is recommended((self._found or {}).values())
        rows = models.draft_details(key, one, is_loaded=is_loaded, is_best=is_best)
        pane = self.query_one("#about")
        pane.border_title = Content(clean_line(one.name) if one is not None else "About")
        pane.border_subtitle = models.keys(one, is_loaded=is_loaded)
        problem = [("problem", clean_line(self._problem))] if self._problem else []
        self.query_one(Labelled).show([*problem, *rows])

    # Keys

    @on(ModelList.Chosen)
    def action_use(self) -> None:
        key = self.query_one(ModelList).marked
        one = (self._found or {}).get(key)
        if not key:
            return
        if one is None:
            self._use(key)
        elif one.verdict is not None and not one.verdict.ok:
            self.warn(f"{one.name} cannot be the draft model: {one.verdict.reason}.")
        elif one.path is not None and one.verdict is None:
            self.warn(f"{one.name} is still being checked.")
        elif one.path is not None:
            self._use(one.spec)
        else:
            self._fetch(one)

    @work(exclusive=True, group="measure")
    async def action_measure(self) -> None:
        one = (self._found or {}).get(self.query_one(ModelList).marked)
        if one is None or one.path is None:
            self.warn("Only a downloaded draft model can be measured.")
        elif one.head is not None:
            self.warn("A draft head cannot be measured beforehand: load it, and the panel shows its acceptance.")
        elif one.verdict is None or not one.verdict.ok:
            self.warn(f"{one.name} is incompatible." if one.verdict else f"{one.name} is still being checked.")
        elif self._services.chat.busy:
            self.warn("You can measure it when the answer is done (Esc in the chat stops it).")
        else:
            screen = MeasurePairScreen(self._services, Path(self._reader.loaded.path), one.path)
            depth = await self.app.push_screen_wait(screen)
            if depth is not None:
                self._use(str(one.path), depth)

    def _use(self, wanted: str, depth: int | None = None) -> None:
        target = Path(self._reader.loaded.path)
        use(self._services, target, wanted, depth)
        self.dismiss(target)

    @work(exclusive=True, group="fetch")
    async def _fetch(self, candidate: Candidate) -> None:
        """Start the download. The app does the rest: this screen may be closed."""
        try:
            repository, model = await run_in_daemon_thread(lambda: self._reader.to_download(candidate))
            download = self._services.downloading.start(repository.id, repository.revision, model, repository.newest_at)
        except CpuchatError as error:
            self.warn(str(error))
            return
        target = Path(self._reader.loaded.path)
        work = use_when_here(self.app, self._services, download, target)
        self.app.run_worker(work, group="drafts", name="drafts")
        self.notify(f"{clean_line(model.name)} will be used once downloaded.", markup=False)
