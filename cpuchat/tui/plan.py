"""Plans: what of the catalog would run on this or another machine, how fast, for how many users, at what cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
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
from cpuchat.planner.specs import HERE, MachineSpec, PlannedModel, ThisMachine, all_machines, models_here, with_costs
from cpuchat.planner.users import plan_users
from cpuchat.present import plan as words
from cpuchat.present.table import ListRow
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import AskTextScreen
from cpuchat.tui.widgets.model_list import ModelList, PanesScreen


class PlanPanes(PanesScreen[ScreenResultType]):
    """A list, and the figures of the selected line."""

    CSS_PATH = Path(__file__).with_name("plan.tcss")

    def show_list(self, title: str, subtitle: str, rows: list[ListRow], mark: str) -> None:
        """Show a list in the frame of these titles."""
        pane = self.query_one("#list")
        pane.border_title, pane.border_subtitle = Content(clean_line(title)), Content(clean_line(subtitle))
        self.listed.show(rows, mark)


class Page(NamedTuple):
    """A list and, by the key of a line, the lines of its details and their title. `mark`: the line to select."""

    title: str
    subtitle: str
    rows: list[ListRow]
    details: Callable[[str], tuple[words.Lines, str]]
    mark: str = ""


class PlanPage(PlanPanes[str | None], keys="plan_page"):
    """Shows a page that a thread computes."""

    def __init__(self, title: str, make: Callable[[], Page]) -> None:
        super().__init__()
        self._title, self._make = title, make
        self._page: Page | None = None

    def on_mount(self) -> None:
        self._compute()

    @work(exclusive=True)
    async def _compute(self) -> None:
        self.show_list(self._title, "computing…", [], "")
        try:
            page = await run_in_daemon_thread(self._make)
        except CpuchatError as error:
            self.show_list(self._title, "", [], "")
            self.show_details([("", error.message), ("", error.hint)], "Not possible")
            return
        self._page = page
        self.show_list(page.title, page.subtitle, page.rows, page.mark)

    @on(ModelList.Marked)
    def _show_marked(self) -> None:
        if self._page is not None and self.marked_key:
            self.show_details(*self._page.details(self.marked_key))


class MachinesPage(PlanPage, keys="plan_machines"):
    """Lists one model on all machines, the fastest first. Returns the id of the one that was chosen."""

    @on(ModelList.Chosen)
    def action_choose(self) -> None:
        self.dismiss(self.marked_key or None)


def _plan_lines(plan: CapacityPlan) -> words.Lines:
    return [*words.lines(plan), ("", ""), *words.machine_figures(plan.machine)]


def machines_page(plans: list[CapacityPlan]) -> Page:
    """Return the page of `machine_plans`."""
    by_id = {plan.machine.id: plan for plan in plans}
    first = plans[0]

    def details(machine: str) -> tuple[words.Lines, str]:
        return _plan_lines(by_id[machine]), by_id[machine].machine.name

    title = f"{first.model.name} {first.model.quantization}, the fastest machine first"
    return Page(title, words.workload_words(first.workload), words.machine_rows(plans), details)


def users_page(plan: CapacityPlan, users: int) -> Page:
    """Return the page of so many users of a plan. Raises UsageError: as of `plan_users`."""
    found = plan_users(plan, users)
    by_key = {str(one.machines): one for one in found.numbers}
    sentences = [("", line) for line in words.user_lines(found, plan)]

    def details(machines: str) -> tuple[words.Lines, str]:
        return [*words.occupancy_lines(by_key[machines]), ("", ""), *sentences], words.title(plan)

    title = f"{plan.machine.name}: {users:,} users"
    return Page(title, words.workload_words(plan.workload), words.user_list(found), details, str(found.enough))


class Question(NamedTuple):
    """A figure that the user can change: its title and bounds."""

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
USERS = Question("Concurrent users", 1, 1_000_000)
COSTS = {
    "price_usd": Question("price (USD)", 1, 1e9, whole=False),
    "watts": Question("power at the wall, under load (W)", 1, 1e6, whole=False),
}


_QUANTIZATIONS = ("", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16")
"""Quantizations to plan the catalog in; "": each model in its default."""


class _Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The list that is asked for: number of the machine (0: this one, then the others), workload, quantization; and by
    the id of a machine what the user says of its price and power, as of `with_costs`."""

    machine: int = 0
    workload: PlannedWorkload = PlannedWorkload()
    quantization: str = ""
    costs: Mapping[str, Mapping[str, float]] = {}


class PlanScreen(PlanPanes[None], keys="plan"):
    """Lists the catalog by planned speed on one machine at a time, and the whole plan of the selected model."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self._machines: list[MachineSpec] = []  # those that are not here
        self._catalog = Catalog(())
        self._wanted = _Wanted()
        self._plans: dict[str, CapacityPlan] = {}
        self._machine_for: MachineFor | None = None  # of the list
        self._files: dict[str, dict[str, PlannedModel]] = {}  # those here, by quantization
        self._drafts: dict[str, int] = {}  # by model: which of the catalog's draft models, then none
        self._problem = ""

    def on_mount(self) -> None:
        self._read()

    @work(exclusive=True, group="read")
    async def _read(self) -> None:
        if not self._machines:
            self._machines, problems = await run_in_daemon_thread(all_machines)
            self._catalog = await run_in_daemon_thread(load_catalog)
            for problem in problems:
                self.warn(problem)
        wanted, folders = self._wanted, self._services.settings.model.folders
        for kind in {"", wanted.quantization} - self._files.keys():
            self._files[kind] = await run_in_daemon_thread(lambda kind=kind: models_here(self._catalog, folders, kind))
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
        here = self._here() if found is None else None

        def machine_for(model: PlannedModel | None, draft: PlannedModel | None) -> MachineSpec:
            machine = found or (here or self._here()).of(model, draft)
            return with_costs(machine, "on this screen", **wanted.costs.get(machine.id, {}))

        models = catalog_models(self._catalog, wanted.quantization, self._files[wanted.quantization])
        return machine_for, machine_for(None, None), catalog_plans(machine_for, models, wanted.workload)

    def _here(self) -> ThisMachine:
        return ThisMachine(self._services.settings, self._services.conversation.model)

    def _show(self, machine: MachineSpec | None, plans: list[CapacityPlan]) -> None:
        self._plans = {plan.model.name: plan for plan in plans}
        wanted, name = self._wanted, machine.name if machine is not None else "This machine"
        self.show_list(
            f"{name} · {wanted.machine + 1} of {len(self._machines) + 1}",
            words.workload_words(wanted.workload, wanted.quantization),
            words.catalog_rows(plans, wanted.workload.tok_s),
            self.marked_key,
        )

    @property
    def has_plans(self) -> bool | None:
        """Return whether the machine of the list could be planned for; None while it is read."""
        return bool(self._plans) if self._plans or self._problem else None

    @property
    def _selected(self) -> CapacityPlan | None:
        return self._plans.get(self.marked_key)

    def _draft(self, model: PlannedModel) -> PlannedModel | None:
        choices = [*catalog_drafts(model, self._catalog, self._files[""]), None]
        return choices[self._drafts.get(model.name, 0) % len(choices)]

    @on(ModelList.Marked)
    @work(exclusive=True, group="details")
    async def _show_plan(self) -> None:
        plan, machine_for = self._selected, self._machine_for
        if plan is None or machine_for is None:
            hint = [("", self._problem), ("", "Meanwhile, plan for another machine.")]
            self.show_details(hint if self._problem else [], "Plan")
            return
        model, workload, draft = plan.model, plan.workload, self._draft(plan.model)
        plan = await run_in_daemon_thread(lambda: make_plan(machine_for(model, draft), model, workload, draft=draft))
        self.show_details(_plan_lines(plan), f"{model.name} {model.quantization}")

    def _change(self, **changes: Any) -> None:
        self._wanted = msgspec.structs.replace(self._wanted, **changes)
        self._read()

    def action_machine(self, step: int) -> None:
        self._change(machine=(self._wanted.machine + step) % (len(self._machines) + 1))

    def action_quantization(self) -> None:
        at = _QUANTIZATIONS.index(self._wanted.quantization)
        self._change(quantization=_QUANTIZATIONS[(at + 1) % len(_QUANTIZATIONS)])

    def action_draft(self) -> None:
        if (plan := self._selected) is None:
            return
        if not catalog_drafts(plan.model, self._catalog):
            self.warn(f"The catalog has no draft model for {plan.model.name}.")
            return
        self._drafts[plan.model.name] = self._drafts.get(plan.model.name, 0) + 1
        self._show_plan()

    @work(exclusive=True, group="ask")
    async def action_ask(self, name: str) -> None:
        """Ask for a figure of the workload, and plan with it."""
        question, now = WORKLOAD[name], getattr(self._wanted.workload, name)
        value = await self._answer(question, question.title, f"{now:.10g}")
        if value is None:
            return
        try:
            self._change(workload=_changed(self._wanted.workload, name, value))
        except UsageError as error:
            self.warn(error.message)

    @work(exclusive=True, group="ask")
    async def action_cost(self, name: str) -> None:
        """Ask for the price or the power of the machine."""
        if (plan := self._selected) is None or self._machine_for is None:
            return
        machine, costs = self._machine_for(plan.model, None), self._wanted.costs
        known = getattr(machine, name)
        question, now = COSTS[name], f"{known.value:.10g}" if known is not None else ""
        value = await self._answer(question, f"{machine.name}: {question.title}", now)
        if value is not None:
            self._change(costs={**costs, machine.id: {**costs.get(machine.id, {}), name: value}})

    async def _answer(self, question: Question, title: str, now: str) -> float | None:
        """Return the number that the user gives; None when it is not given, or wrong."""
        text = await self.app.push_screen_wait(AskTextScreen(title, now))
        try:
            return question.parse(text) if text is not None else None
        except UsageError as error:
            self.warn(error.message)
            return None

    @work(exclusive=True, group="ask")
    async def action_machines(self) -> None:
        """Compare all machines for the selected model; the one that is chosen becomes that of the list."""
        if (plan := self._selected) is None:
            return
        wanted, draft = self._wanted, self._draft(plan.model)

        def make() -> Page:
            machines = list(self._machines)
            with contextlib.suppress(CpuchatError):  # this machine was not measured yet
                machines.append(self._here().of(plan.model, draft))
            priced = [with_costs(one, "on this screen", **wanted.costs.get(one.id, {})) for one in machines]
            return machines_page(machine_plans(priced, plan.model, wanted.workload, draft=draft))

        chosen = await self.app.push_screen_wait(MachinesPage(f"{plan.model.name} {plan.model.quantization}", make))
        if chosen is not None:
            self._change(machine=[HERE, *(one.id for one in self._machines)].index(chosen))

    @work(exclusive=True, group="ask")
    async def action_users(self) -> None:
        """Ask for a number of users of the selected model, and show how many machines they need."""
        if (plan := self._selected) is None or (users := await self._answer(USERS, USERS.title, "")) is None:
            return
        machine, model, workload = plan.machine, plan.model, self._wanted.workload
        page = PlanPage(machine.name, lambda: users_page(make_plan(machine, model, workload), int(users)))
        await self.app.push_screen_wait(page)


def _changed(workload: PlannedWorkload, name: str, value: float) -> PlannedWorkload:
    """Return the workload with another figure; a longer prompt or answer takes a longer context. Raises UsageError: as
    of `PlannedWorkload`.
    """
    changes = {name: value}
    if name in ("n_prompt", "n_answer"):
        other = workload.n_answer if name == "n_prompt" else workload.n_prompt
        changes["n_ctx"] = max(workload.n_ctx, int(value) + other)
    return msgspec.structs.replace(workload, **changes)
