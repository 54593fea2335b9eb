"""Draft models for the loaded model and their predicted speed-up: use one, download it first if needed, measure it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on, work
from textual.app import App, ComposeResult

from cpuchat.base.errors import CpuchatError, HubError, Interrupted
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.models.drafts.candidates import (
    DraftCandidate,
    candidates,
    check,
    measured_acceptance,
    model_of,
    recommended,
)
from cpuchat.models.drafts.choice import ChosenDrafts, choose_draft, heads_of, local_heads
from cpuchat.present import models
from cpuchat.present.table import ListRow, table
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.tui.models.reader import ModelsReader
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import Dialog
from cpuchat.tui.widgets.download_line import DownloadLine
from cpuchat.tui.widgets.model_list import ModelList, PanesScreen

if TYPE_CHECKING:
    from cpuchat.bench.run import Bench, PairResult
    from cpuchat.models.downloads.state import Download
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.models.hub.repository import RepoModel, Repository


async def use_when_here(app: App[Any], services: Services, download: Download, target: Path) -> None:
    """Wait for `download`, through pauses and retries, then use it, and reload `target` if that is still the model and
    nothing runs."""
    done = await services.downloading.arrival(download.id)
    if done is None:
        return  # the user has taken it off the list
    name = clean_line(done.order.model.name)
    try:
        await run_in_daemon_thread(lambda: choose_draft(target, done.path, services.library, heads=True))
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
        app.notify(f"{name} will be the draft model of {clean_line(target.stem)} from its next load.", markup=False)


_RIGHT = (1, 2, 3, 4)


class MeasurePairScreen(Dialog[bool | None], keys="measure_pair"):
    """Returns whether to use the draft model; measures in a worker of its own, beside the chat's."""

    def __init__(self, services: Services, target: Path, draft: Path) -> None:
        super().__init__(f"{draft.stem} drafting for {target.stem}", "Starting…", "Esc stops")
        self._services = services
        self._target, self._draft = target, draft
        self._bench: Bench | None = None
        self.result: PairResult | None = None

    def on_mount(self) -> None:
        self._measure()

    @work(exclusive=True)
    async def _measure(self) -> None:
        from cpuchat.bench.run import pair_bench
        from cpuchat.present.bench import pair_verdict

        running = self._bench = pair_bench(self._target, self._draft, self._services.settings, self._show)
        try:
            await running.run()
        except Interrupted:
            self.dismiss(None)
        except (CpuchatError, OSError) as error:
            self._fail(str(error))
        else:
            measured, lines = _figures(running)
            if measured.kinds:
                self.result = measured
                self.show_text([*lines, "", pair_verdict(measured)], "Enter uses it · Esc closes")
            else:
                self._fail(next(iter(running.failed.values()), pair_verdict(measured)))
        finally:
            self._bench = None

    def _show(self) -> None:
        from cpuchat.present.bench import progress_bar

        if self._bench is not None and self.has_widgets:
            lines, progress = _figures(self._bench)[1], self._bench.progress
            bar = progress_bar(progress.done, progress.total, progress.seconds_left, progress.what)
            self.show_text([*lines, "", bar] if lines else [bar])

    def _fail(self, problem: str) -> None:
        self.show_text([f"Not measured. {clean_line(problem)}"], "Esc closes")

    def action_keep(self) -> None:
        if self.result is not None:
            self.dismiss(True)

    async def action_cancel(self) -> None:
        if self._bench is not None:
            self.show_hint("Stopping…")
            await self._bench.stop()
        else:
            self.dismiss(None)


def _figures(bench: Bench) -> tuple[PairResult, list[str]]:
    """Return what was measured so far, and its table; [] before there is a row."""
    from cpuchat.bench.run import pair_result
    from cpuchat.present.bench import PAIR_HEADINGS, pair_rows

    measured = pair_result(bench.report().results if bench.measured else ())
    rows = pair_rows(measured)
    return measured, table([PAIR_HEADINGS, *rows], right=_RIGHT) if rows else []


@dataclass(frozen=True)
class DraftReader:
    """Reads for the loaded model; blocks, so call it in threads. `acceptance` was measured with its draft model, None
    if not."""

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

    def candidates(self) -> tuple[GGUFHeader, list[DraftCandidate]]:
        """Return the target's header and the candidates, unchecked. Raises ModelNotFound, ModelDamaged: the file of the
        loaded model is gone or has changed.
        """
        from cpuchat.models.drafts.candidates import target_costs
        from cpuchat.models.machine import machine_for

        target = self.models.header(Path(self.loaded.path))
        costs = target_costs(target.path)
        if self.loaded.pass_ms:  # measured with the cores in use
            costs = costs._replace(pass_ms=self.loaded.pass_ms)
        here = self.services.library.local_models(beside=target.path)
        beside = next((model.path for model in here if self.is_loaded(model.name, model.quantization)), None)
        machine = machine_for(target.path, self.models.settings, self.loaded)
        found = candidates(target, here, self.models.catalog(), costs, machine,
                           acceptance=self.acceptance, beside=beside)  # fmt: skip
        return target, [*local_heads(target, here), *found]

    def heads_on_hub(self, target: GGUFHeader, found: Iterable[DraftCandidate]) -> list[DraftCandidate]:
        """Return the draft heads in the target's repository that are not `found` here; [] when it cannot be reached."""
        repo = next((model.repo for model in self.models.local_models() if model.path == target.path), "")
        with contextlib.suppress(HubError):
            return heads_of(self.services.hub.repository(repo), found) if repo else []
        return []

    def is_loaded(self, name: str, quantization: str) -> bool:
        """Return whether it is the loaded draft model."""
        return bool(name) and (name, quantization) == (self.loaded.draft, self.loaded.draft_quantization)

    def check(self, candidate: DraftCandidate, target: GGUFHeader) -> DraftCandidate:
        """Return the candidate with its verdict, or why there is none; for a remote one, its header is requested."""
        return check(candidate, target, hub=self.services.hub)

    def to_download(self, candidate: DraftCandidate) -> tuple[Repository, RepoModel]:
        """Find its file. Raises HubError and its kinds."""
        repository = self.services.hub.repository(candidate.repo)
        return repository, model_of(repository, candidate)


class DraftModelsScreen(PanesScreen[Path | None], keys="draft_models"):
    """Returns the loaded model's file if it has to be loaded again, else None. Verdicts fill in one by one."""

    CSS_PATH = "draft_models.tcss"

    def __init__(self, services: Services, reader: DraftReader | None = None) -> None:
        super().__init__()
        self._services = services
        self._reader = reader or DraftReader.of(services)
        self.list_title = f"Draft models for {self._reader.loaded.name}"
        self._target = Path(self._reader.loaded.path)
        self._candidates: dict[str, DraftCandidate] | None = None
        self._problem = ""

    def compose_below(self) -> ComposeResult:
        yield DownloadLine(self._services.downloading)

    def on_mount(self) -> None:
        self._show()
        self._read(self._reader)

    @work(exclusive=True, group="read")
    async def _read(self, reader: DraftReader) -> None:
        try:
            target, listed = await run_in_daemon_thread(reader.candidates)
        except (CpuchatError, OSError) as error:
            self._candidates, self._problem = {}, str(error)
            self._show()
            return
        self._put(*listed)
        for candidate in sorted(listed, key=lambda candidate: candidate.where == "hub"):  # it may let all others wait
            self._put(await run_in_daemon_thread(partial(reader.check, candidate, target)))
        for candidate in await run_in_daemon_thread(lambda: reader.heads_on_hub(target, listed)):
            self._put(candidate)
            self._put(await run_in_daemon_thread(partial(reader.check, candidate, target)))

    def _put(self, *candidates: DraftCandidate) -> None:
        self._candidates = (self._candidates or {}) | {candidate.spec: candidate for candidate in candidates}
        self._show()

    def _is_loaded(self, candidate: DraftCandidate) -> bool:
        return self._reader.is_loaded(candidate.name, candidate.quantization)

    @property
    def _marked(self) -> DraftCandidate | None:
        return (self._candidates or {}).get(self.marked_key)

    def _show(self) -> None:
        listed, candidates = self.listed, self._candidates
        if candidates is None:
            listed.show([ListRow(note="Reading…")])
            return
        loaded = next((key for key, candidate in candidates.items() if self._is_loaded(candidate)), "")
        chosen = self._services.settings.speculation.wanted_draft or ChosenDrafts().of(self._target) or models.AUTO
        mark = listed.marked if listed.moved else loaded or next(iter(candidates), "")
        listed.show(models.draft_rows(candidates, loaded, chosen), mark)
        if not candidates and not self._problem:
            self.query_one("#list").border_subtitle = "no smaller model here, none in the catalog"

    @on(ModelList.Marked)
    def _show_details(self) -> None:
        candidate = self._marked
        if not self.marked_key:
            return
        is_loaded = candidate is not None and self._is_loaded(candidate)
        is_best = candidate is not None and candidate is recommended((self._candidates or {}).values())
        rows = models.draft_details(self.marked_key, candidate, is_loaded=is_loaded, is_best=is_best)
        problem = [("problem", self._problem)] if self._problem else []
        title = candidate.name if candidate is not None else "About"
        self.show_details([*problem, *rows], title, models.keys(candidate, is_loaded=is_loaded))

    @on(ModelList.Chosen)
    def action_use(self) -> None:
        candidate = self._marked
        if not self.marked_key:
            return
        if candidate is None:
            self._use(self.marked_key)
        elif candidate.verdict is not None and not candidate.verdict.ok:
            self.warn(f"{candidate.name} cannot be the draft model: {candidate.verdict.reason}.")
        elif candidate.path is None:
            self._fetch(candidate)
        elif candidate.verdict is None:
            self.warn(f"{candidate.name} is still being checked.")
        else:
            self._use(candidate.spec)

    @work(exclusive=True, group="measure")
    async def action_measure(self) -> None:
        candidate = self._marked
        if candidate is None or candidate.path is None:
            self.warn("Only a downloaded draft model can be measured.")
        elif candidate.head is not None:
            self.warn("A draft head cannot be measured beforehand: load it, and the panel shows its acceptance.")
        elif not candidate.fits:
            state = "incompatible" if candidate.verdict else "still being checked"
            self.warn(f"{candidate.name} is {state}.")
        elif self._services.session.busy:
            self.warn("You can measure it when the answer is done (Esc in the chat stops it).")
        else:
            screen = MeasurePairScreen(self._services, self._target, candidate.path)
            if await self.app.push_screen_wait(screen):
                self._use(str(candidate.path))

    def _use(self, wanted: str) -> None:
        self._services.use_draft_model(self._target, wanted)
        self.dismiss(self._target)

    @work(exclusive=True, group="fetch")
    async def _fetch(self, candidate: DraftCandidate) -> None:
        """Start the download. The app does the rest: this screen may be closed."""
        try:
            repository, model = await run_in_daemon_thread(lambda: self._reader.to_download(candidate))
            download = self._services.downloading.start(repository.id, repository.revision, model, repository.newest_at)
        except CpuchatError as error:
            self.warn(str(error))
            return
        work = use_when_here(self.app, self._services, download, self._target)
        self.app.run_worker(work, group="drafts", name="drafts")
        self.notify(f"{clean_line(model.name)} will be used once downloaded.", markup=False)
