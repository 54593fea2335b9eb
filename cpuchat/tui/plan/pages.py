"""Pages of the plan screen: one model on all machines, concurrent users."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ScreenResultType

from cpuchat.daemon_thread import run_in_daemon_thread
from cpuchat.errors import CpuchatError
from cpuchat.planner.plan import Plan
from cpuchat.planner.service import simulate_service
from cpuchat.present import plan as words
from cpuchat.present import plan_lists as lists
from cpuchat.present.rows import ListRow
from cpuchat.text import clean_line
from cpuchat.tui import keys
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.labelled import Labelled
from cpuchat.tui.widgets.list_screen import ListScreen
from cpuchat.tui.widgets.model_list import ModelList


class PlanPanes(ListScreen[ScreenResultType]):
    """A list, and the figures of the selected line beside it, or below it on narrow terminals."""

    CSS_PATH = "plan.tcss"
    AUTO_FOCUS = ""

    def compose(self) -> ComposeResult:
        with Horizontal(id="panes"):
            with Vertical(id="list"):
                yield ModelList(id="models")
            with Vertical(id="about"):
                yield Labelled(id="details")
        yield KeyFooter()

    def show_list(self, title: str, subtitle: str, rows: list[ListRow], mark: str) -> None:
        """Show a list in the frame of these titles."""
        pane = self.query_one("#list")
        pane.border_title, pane.border_subtitle = Content(clean_line(title)), Content(clean_line(subtitle))
        self.query_one(ModelList).show(rows, mark)

    def show_details(self, title: str, lines: words.Lines) -> None:
        """Show labels and texts; the texts are cleaned."""
        self.query_one("#about").border_title = Content(clean_line(title))
        self.query_one(Labelled).show([(label, clean_line(text)) for label, text in lines])


class Page(NamedTuple):
    """A list and, by the key of a line, the title and the lines of its details. `mark`: the line to select."""

    title: str
    subtitle: str
    rows: list[ListRow]
    details: Callable[[str], tuple[str, words.Lines]]
    mark: str = ""


class PlanPage(PlanPanes[str | None]):
    """Shows a page that a thread computes."""

    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("plan_page")
    KEYS: ClassVar = "plan_page"

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
            if self.has_widgets:
                self.show_list(self._title, "", [], "")
                self.show_details("Not possible", [("", error.message), ("", error.hint)])
            return
        if self.has_widgets:
            self._page = page
            self.show_list(page.title, page.subtitle, page.rows, page.mark)

    @on(ModelList.Marked)
    def _show_marked(self) -> None:
        marked = self.query_one(ModelList).marked
        if self._page is not None and marked:
            self.show_details(*self._page.details(marked))


class MachinesPage(PlanPage):
    """Lists one model on all machines, the cheapest first. Returns the id of the one that was chosen."""

    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("plan_machines")
    KEYS: ClassVar = "plan_machines"

    @on(ModelList.Chosen)
    def action_choose(self) -> None:
        self.dismiss(self.query_one(ModelList).marked or None)


def machines_page(plans: list[Plan]) -> Page:
    """Return the page of `machine_plans`."""
    by_id = {plan.machine.id: plan for plan in plans}
    first = plans[0]

    def details(machine: str) -> tuple[str, words.Lines]:
        plan = by_id[machine]
        return plan.machine.name, [*words.lines(plan), ("", ""), *words.machine_figures(plan.machine)]

    title = f"{first.model.name} {first.model.quantization}, the cheapest machine first"
    return Page(title, words.workload_words(first.workload, "", first.network), lists.machine_rows(plans), details)


def users_page(plan: Plan) -> Page:
    """Simulate the users of a plan.

    Raises:
        UsageError: as of `simulate_service`.
    """
    service = simulate_service(plan)
    by_key = {str(one.machines): one for one in service.outcomes}
    sentences = [("", line) for line in words.service_lines(service, plan)]

    def details(machines: str) -> tuple[str, words.Lines]:
        title = f"{plan.model.name} {plan.model.quantization} on {plan.machine.name}"
        return title, [*lists.outcome_lines(by_key[machines]), ("", ""), *sentences]

    mark = str(service.enough or service.outcomes[-1].machines)
    title = f"{plan.machine.name}: simulation of {service.users:,} users"
    return Page(title, words.workload_words(plan.workload, ""), lists.service_list(service), details, mark)
