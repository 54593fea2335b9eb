"""Plans: what of the catalog would run on this or another machine, how fast, for how many users, at what cost."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import msgspec
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Footer

from cpuchat.errors import CpuchatError, UsageError
from cpuchat.models.catalog import Catalog, load_catalog
from cpuchat.planner.choices import catalog_plans, usual_draft
from cpuchat.planner.machine_specs import MachineSpec, all_machines
from cpuchat.planner.plan import Plan, Workload, make_plan
from cpuchat.planner.this_machine import machine_here
from cpuchat.present import plan as words
from cpuchat.text import clean_line
from cpuchat.tui import keys
from cpuchat.tui.services import Services
from cpuchat.tui.threads import run_in_daemon_thread
from cpuchat.tui.widgets.dialogs import AskTextScreen
from cpuchat.tui.widgets.labelled import Labelled
from cpuchat.tui.widgets.list_screen import ListScreen
from cpuchat.tui.widgets.model_list import ModelList

_QUANTIZATIONS = ("", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16")
"""Quantizations to plan the catalog in; "": each model in its default."""


class _Asked(NamedTuple):
    """A figure of the workload that the user can change: its question and bounds."""

    title: str
    least: float
    most: float
    whole: bool = True

    def parse(self, text: str) -> float:
        """Return the number. Raises UsageError."""
        try:
            value = float(text.replace(",", "").replace("_", "").replace(" ", ""))
        except ValueError:
            raise UsageError(f"{text} is not a number.") from None
        if not self.least <= value <= self.most or (self.whole and value % 1):
            what = "a whole number" if self.whole else "a number"
            raise UsageError(f"Give {what} from {self.least:g} to {self.most:,.0f}.")
        return int(value) if self.whole else value


_ASKED = {
    "n_ctx": _Asked("Context per chat (tokens)", 256, 10_000_000),
    "n_prompt": _Asked("Prompt length (tokens)", 1, 9_000_000),
    "users": _Asked("Concurrent users", 1, 1_000_000),
    "tok_s": _Asked("Target tok/s per user", 0.1, 1_000_000, whole=False),
}


class PlanScreen(ListScreen[None]):
    """Lists the catalog by planned speed on one machine at a time, and the whole plan of the selected model."""

    CSS_PATH = "plan.tcss"
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("plan")
    KEYS: ClassVar = "plan"

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self._machines: list[MachineSpec] = []  # those that are not here
        self._at = 0  # 0: this machine, then the others
        self._workload = Workload()
        self._quantization = ""
        self._catalog: Catalog | None = None
        self._plans: dict[str, Plan] = {}
        self._problem = ""

    def compose(self) -> ComposeResult:
        with Horizontal(id="panes"):
            with Vertical(id="list"):
                yield ModelList(id="models")
            with Vertical(id="about"):
                yield Labelled(id="details")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self._read()

    @work(exclusive=True, group="read")
    async def _read(self) -> None:
        if self._catalog is None:
            await self._read_files()
        at, workload, quantization = self._at, self._workload, self._quantization
        try:
            found = await run_in_daemon_thread(lambda: self._planned(at, workload, quantization))
            (machine, plans), self._problem = found, ""
        except CpuchatError as error:  # this machine was not measured yet
            machine, plans, self._problem = None, [], error.message
        if (at, workload, quantization) == (self._at, self._workload, self._quantization) and self.has_widgets:
            self._show(machine, plans)

    async def _read_files(self) -> None:
        self._machines, problems = await run_in_daemon_thread(all_machines)
        self._catalog = await run_in_daemon_thread(load_catalog)
        for one in problems:
            self.notify(clean_line(one), severity="warning", markup=False)

    def _planned(self, at: int, workload: Workload, quantization: str) -> tuple[MachineSpec, list[Plan]]:
        """Return a machine and the plans of the catalog on it; some tenths of a second, in a thread."""
        assert self._catalog is not None  # read before
        here = machine_here(self._services.settings, self._services.conversation.model) if at == 0 else None
        machine = here or self._machines[at - 1]
        return machine, catalog_plans(machine, self._catalog.models, workload, quantization)

    def _show(self, machine: MachineSpec | None, plans: list[Plan]) -> None:
        self._plans = {plan.model.name: plan for plan in plans}
        listed, pane = self.query_one(ModelList), self.query_one("#list")
        name = clean_line(machine.name) if machine is not None else "This machine"
        pane.border_title = Content(f"{name} · {self._at + 1} of {len(self._machines) + 1}")
        pane.border_subtitle = Content(words.workload_words(self._workload, self._quantization))
        listed.show(words.catalog_rows(plans, self._workload.tok_s), listed.marked)

    @on(ModelList.Marked)
    def _show_details(self) -> None:
        plan = self._plans.get(self.query_one(ModelList).marked)
        pane = self.query_one("#about")
        if plan is None:
            pane.border_title = "Plan"
            self.query_one(Labelled).show([("", clean_line(self._problem))] if self._problem else [])
            return
        draft = usual_draft(plan.model, self._catalog) if self._catalog is not None else None
        plan = make_plan(plan.machine, plan.model, plan.workload, draft=draft)
        pane.border_title = Content(clean_line(f"{plan.model.name} {plan.model.quantization}"))
        beside = [("draft", f"{draft.name} {draft.quantization}")] if draft is not None else []
        self.query_one(Labelled).show([*words.lines(plan), *beside, ("", ""), *words.machine_figures(plan.machine)])

    def action_machine(self, step: int) -> None:
        self._at = (self._at + step) % (len(self._machines) + 1)
        self._read()

    def action_quantization(self) -> None:
        at = _QUANTIZATIONS.index(self._quantization)
        self._quantization = _QUANTIZATIONS[(at + 1) % len(_QUANTIZATIONS)]
        self._read()

    @work(exclusive=True, group="ask")
    async def action_ask(self, name: str) -> None:
        asked, now = _ASKED[name], getattr(self._workload, name)
        text = await self.app.push_screen_wait(AskTextScreen(asked.title, f"{now:g}" if name == "tok_s" else str(now)))
        if text is None:
            return
        try:
            value = asked.parse(text)
            changed = {name: value}
            if name == "n_prompt":  # a longer prompt takes a longer context
                changed["n_ctx"] = max(self._workload.n_ctx, int(value) + self._workload.n_answer)
            self._workload = msgspec.structs.replace(self._workload, **changed)
        except UsageError as error:
            self.notify(error.message, severity="warning", markup=False)
            return
        self._read()

    def action_close(self) -> None:
        self.dismiss(None)
