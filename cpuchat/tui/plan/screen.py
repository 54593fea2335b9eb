"""Plans: what of the catalog would run on this or another machine, how fast, for how many users, at what cost."""

from __future__ import annotations

from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Footer

from cpuchat.errors import CpuchatError
from cpuchat.models.catalog import Catalog, load_catalog
from cpuchat.planner.choices import catalog_plans, usual_draft
from cpuchat.planner.here import machine_here
from cpuchat.planner.machine_specs import HERE, MachineSpec, machines
from cpuchat.planner.plan import Load, Plan, make_plan
from cpuchat.present import plan as words
from cpuchat.text import clean_line
from cpuchat.tui import keys
from cpuchat.tui.services import Services
from cpuchat.tui.threads import run_in_daemon_thread
from cpuchat.tui.widgets.labelled import Labelled
from cpuchat.tui.widgets.list_screen import ListScreen
from cpuchat.tui.widgets.model_list import ModelList


class PlanScreen(ListScreen[None]):
    """Lists the catalog by planned speed on one machine at a time, and the whole plan of the selected model."""

    CSS_PATH = "plan.tcss"
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("plan")
    KEYS: ClassVar = "plan"

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self._machines = [HERE, *(one.id for one in machines())]
        self._at = 0
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
        name = self._machines[self._at]
        try:
            machine, plans, self._problem = *await run_in_daemon_thread(lambda: self._planned(name)), ""
        except CpuchatError as error:  # this machine was not measured yet
            machine, plans, self._problem = None, [], str(error)
        if self._machines[self._at] == name and self.has_widgets:
            self._show(machine, plans)

    def _planned(self, name: str) -> tuple[MachineSpec, list[Plan]]:
        """Return the machine of that id and the plans of the catalog on it; some ten milliseconds, in a thread."""
        self._catalog = self._catalog or load_catalog()
        here = name == HERE
        loaded = self._services.conversation.model
        machine = (
            machine_here(self._services.settings, loaded) if here else next(one for one in machines() if one.id == name)
        )
        return machine, catalog_plans(machine, self._catalog.models, Load())

    def _show(self, machine: MachineSpec | None, plans: list[Plan]) -> None:
        self._plans = {plan.model.name: plan for plan in plans}
        listed = self.query_one(ModelList)
        pane = self.query_one("#list")
        pane.border_title = Content(clean_line(machine.name if machine is not None else "This machine"))
        pane.border_subtitle = f"machine {self._at + 1} of {len(self._machines)} · ← → another"
        listed.show(words.catalog_rows(plans), listed.marked)

    @on(ModelList.Marked)
    def _show_details(self) -> None:
        plan = self._plans.get(self.query_one(ModelList).marked)
        pane = self.query_one("#about")
        if plan is None:
            pane.border_title = "Plan"
            self.query_one(Labelled).show([("", clean_line(self._problem))] if self._problem else [])
            return
        draft = usual_draft(plan.model, self._catalog) if self._catalog is not None else None
        plan = make_plan(plan.machine, plan.model, plan.load, draft=draft)
        pane.border_title = Content(clean_line(f"{plan.model.name} {plan.model.quantization}"))
        beside = [("draft", f"{draft.name} {draft.quantization}")] if draft is not None else []
        self.query_one(Labelled).show([*words.lines(plan), *beside, ("", ""), *words.machine_figures(plan.machine)])

    def action_machine(self, step: int) -> None:
        self._at = (self._at + step) % len(self._machines)
        self._read()

    def action_close(self) -> None:
        self.dismiss(None)
