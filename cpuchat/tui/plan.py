"""Plans: what of the catalog would run on this or another machine, and how fast."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from textual import on, work
from textual.content import Content
from textual.screen import ScreenResultType

from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.models.catalog import Catalog, load_catalog
from cpuchat.planner.plan import (
    CapacityPlan,
    MachineFor,
    PlannedWorkload,
    catalog_drafts,
    catalog_models,
    catalog_plans,
    machine_plans,
    make_plan,
)
from cpuchat.planner.specs import HERE, MachineSpec, PlannedModel, ThisMachine, all_machines, models_here
from cpuchat.present import plan as words
from cpuchat.present.table import ListRow
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import AskTextScreen
from cpuchat.tui.widgets.model_list import ModelList, PanesScreen


class PlanPanes(PanesScreen[ScreenResultType]):
    """A list, and the plan of the selected line."""

    CSS_PATH = Path(__file__).with_name("plan.tcss")

    def show_list(self, title: str, subtitle: str, rows: list[ListRow], mark: str) -> None:
        """Show a list in the frame of these titles."""
        pane = self.query_one("#list")
        pane.border_title, pane.border_subtitle = Content(clean_line(title)), Content(clean_line(subtitle))
        self.listed.show(rows, mark)

    def show_plan(self, plan: CapacityPlan, title: str) -> None:
        self.show_details([*words.lines(plan), ("", ""), *words.machine_figures(plan.machine)], title)


class MachinesScreen(PlanPanes[str | None], keys="plan_machines"):
    """Lists one model on all machines, the fastest first. Returns the id of the one that was chosen."""

    def __init__(self, plans: list[CapacityPlan]) -> None:
        super().__init__()
        self._plans = {plan.machine.id: plan for plan in plans}

    def on_mount(self) -> None:
        plans = list(self._plans.values())
        title = f"{plans[0].model.name} {plans[0].model.quantization}, the fastest machine first"
        self.show_list(title, words.workload_words(plans[0].workload), words.machine_rows(plans), "")

    @on(ModelList.Marked)
    def _show_marked(self) -> None:
        if (plan := self._plans.get(self.marked_key)) is not None:
            self.show_plan(plan, plan.machine.name)

    @on(ModelList.Chosen)
    def action_choose(self) -> None:
        self.dismiss(self.marked_key or None)


class Question(NamedTuple):
    """A figure of the workload that the user can change: its title and bounds."""

    title: str
    minimum: float
    maximum: float
    whole: bool = True

    def parse(self, text: str) -> float:
        """Return the number. Raises UsageError."""
        try:
            value = float(text.replace(",", "").replace("_", "").replace(" ", ""))
        except ValueError:
            raise UsageError(f"{text} is not a number.") from None
        if not self.minimum <= value <= self.maximum or (self.whole and value % 1):
            what = "a whole number" if self.whole else "a number"
            raise UsageError(f"Give {what} from {self.minimum:g} to {self.maximum:,.0f}.")
        return int(value) if self.whole else value


WORKLOAD = {
    "n_ctx": Question("Context per chat (tokens)", 256, 10_000_000),
    "n_prompt": Question("Prompt length (tokens)", 1, 9_000_000),
    "n_answer": Question("Answer length (tokens)", 1, 9_000_000),
    "tok_s": Question("Target tok/s per user", 0.1, 1_000_000, whole=False),
}


class _Wanted(msgspec.Struct, frozen=True):
    """The list that is asked for: number of the machine (0: this one, then the others), and workload."""

    machine: int = 0
    workload: PlannedWorkload = PlannedWorkload()


class PlanScreen(PlanPanes[None], keys="plan"):
    """Lists the catalog by planned speed on one machine at a time, and the whole plan of the selected model."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self._machines: list[MachineSpec] = []  # those that are not here
        self._catalog = Catalog(())
        self._here: dict[str, PlannedModel] = {}  # models of the catalog that are here
        self._wanted = _Wanted()
        self._plans: dict[str, CapacityPlan] = {}
        self._machine_for: MachineFor | None = None  # of the list
        self._drafts: dict[str, int] = {}  # by model: which of the catalog's draft models, then none
        self._problem = ""

    def on_mount(self) -> None:
        self._read()

    @work(exclusive=True, group="read")
    async def _read(self) -> None:
        if not self._machines:
            self._machines, problems = await run_in_daemon_thread(all_machines)
            self._catalog = await run_in_daemon_thread(load_catalog)
            folders = self._services.settings.model.folders
            self._here = await run_in_daemon_thread(lambda: models_here(self._catalog, folders, ""))
            for problem in problems:
                self.warn(problem)
        wanted = self._wanted
        try:
            self._machine_for, machine, plans = await run_in_daemon_thread(lambda: self._planned(wanted))
            self._problem = ""
        except CpuchatError as error:  # this machine was not measured yet
            machine, plans, self._problem = None, [], error.message
        if wanted is self._wanted:
            self._show(machine, plans)

    def _planned(self, wanted: _Wanted) -> tuple[MachineFor, MachineSpec, list[CapacityPlan]]:
        """Return a machine and the plans of the catalog on it; some tenths of a second, in a thread."""
        found = self._machines[wanted.machine - 1] if wanted.machine else None
        here = self._this_machine() if found is None else None

        def machine_for(model: PlannedModel | None, draft: PlannedModel | None) -> MachineSpec:
            return found or (here or self._this_machine()).of(model, draft)

        models = catalog_models(self._catalog, "", self._here)
        return machine_for, machine_for(None, None), catalog_plans(machine_for, models, wanted.workload)

    def _this_machine(self) -> ThisMachine:
        return ThisMachine(self._services.settings, self._services.conversation.model)

    def _show(self, machine: MachineSpec | None, plans: list[CapacityPlan]) -> None:
        self._plans = {plan.model.name: plan for plan in plans}
        wanted, name = self._wanted, machine.name if machine is not None else "This machine"
        self.show_list(
            f"{name} · {wanted.machine + 1} of {len(self._machines) + 1}",
            words.workload_words(wanted.workload),
            words.catalog_rows(plans, wanted.workload.tok_s),
            self.marked_key,
        )

    def _draft(self, model: PlannedModel) -> PlannedModel | None:
        choices = [*catalog_drafts(model, self._catalog, self._here), None]
        return choices[self._drafts.get(model.name, 0) % len(choices)]

    @on(ModelList.Marked)
    @work(exclusive=True, group="details")
    async def _show_plan(self) -> None:
        plan, machine_for = self._plans.get(self.marked_key), self._machine_for
        if plan is None or machine_for is None:
            hint = [("", self._problem), ("", "Meanwhile, plan for another machine.")]
            self.show_details(hint if self._problem else [], "Plan")
            return
        model, workload, draft = plan.model, plan.workload, self._draft(plan.model)
        plan = await run_in_daemon_thread(lambda: make_plan(machine_for(model, draft), model, workload, draft=draft))
        self.show_plan(plan, f"{model.name} {model.quantization}")

    def _change(self, **changes: Any) -> None:
        self._wanted = msgspec.structs.replace(self._wanted, **changes)
        self._read()

    def action_machine(self, step: int) -> None:
        self._change(machine=(self._wanted.machine + step) % (len(self._machines) + 1))

    def action_draft(self) -> None:
        if (plan := self._plans.get(self.marked_key)) is None:
            return
        if not catalog_drafts(plan.model, self._catalog):
            self.warn(f"The catalog has no draft model for {plan.model.name}.")
            return
        self._drafts[plan.model.name] = self._drafts.get(plan.model.name, 0) + 1
        self._show_plan()

    @work(exclusive=True, group="ask")
    async def action_ask(self, name: str) -> None:
        """Ask for a figure of the workload, and plan with it; a longer prompt or answer takes a longer context."""
        question, workload = WORKLOAD[name], self._wanted.workload
        text = await self.app.push_screen_wait(AskTextScreen(question.title, f"{getattr(workload, name):.10g}"))
        if text is None:
            return
        try:
            changes = {name: question.parse(text)}
            if name in ("n_prompt", "n_answer"):
                other = workload.n_answer if name == "n_prompt" else workload.n_prompt
                changes["n_ctx"] = max(workload.n_ctx, int(changes[name]) + other)
            self._change(workload=msgspec.structs.replace(workload, **changes))
        except UsageError as error:
            self.warn(error.message)

    @work(exclusive=True, group="ask")
    async def action_machines(self) -> None:
        """Compare all machines for the selected model; the one that is chosen becomes that of the list."""
        if (plan := self._plans.get(self.marked_key)) is None:
            return
        model, workload, draft = plan.model, self._wanted.workload, self._draft(plan.model)

        def make() -> list[CapacityPlan]:
            machines = list(self._machines)
            with contextlib.suppress(CpuchatError):  # this machine was not measured yet
                machines.append(self._this_machine().of(model, draft))
            return machine_plans(machines, model, workload, draft=draft)

        chosen = await self.app.push_screen_wait(MachinesScreen(await run_in_daemon_thread(make)))
        if chosen is not None:
            self._change(machine=[HERE, *(one.id for one in self._machines)].index(chosen))
