"""What the hardware screen shows beside the picture: facts about the machine and the worker, what runs on this machine,
and a list of placements with fields to edit one as text; and what it reads and measures for them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.table import Table
from rich.text import Text
from textual import events, on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from cpuchat.base.errors import CpuchatError, Interrupted
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.bench.cost_probe import CostProbe, probe_costs
from cpuchat.hardware.machine import MachineFacts
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.machine import Machine, this_machine
from cpuchat.present import machine, models
from cpuchat.present.machine import Now, costs_measured, cpu_module, kernels_used, passes_measured
from cpuchat.telemetry import units
from cpuchat.telemetry.units import gigabytes
from cpuchat.tui.settings import Field

if TYPE_CHECKING:
    from cpuchat.config.settings import Settings
    from cpuchat.hardware.bandwidth.read_bandwidth import Survey
    from cpuchat.hardware.bandwidth.theoretical import Theoretical
    from cpuchat.hardware.machine import MachineReader
    from cpuchat.hardware.placement.placement import Placement
    from cpuchat.models.prediction import Prediction
    from cpuchat.present.machine import TypicalModel
    from cpuchat.protocol.model_info import ModelInfo
    from cpuchat.tui.services import Services
    from cpuchat.tune.candidates import LoadedCosts, PlacementOption


_LABEL, _BEFORE_BAR, _LONGEST_BAR = 16, 68, 48


class FactsTable(Static):
    """Rows of a label and a text; the read bandwidth as bars where there is room (class `-bars`)."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"facts--fill", "facts--track", "facts--dim"}
    DEFAULT_CSS = """
    FactsTable {
        width: 100%;
        height: auto;
        & > .facts--fill { color: $accent; }
        & > .facts--track { color: $foreground 25%; }
        & > .facts--dim { color: $hint; }
    }
    """

    def show(self, facts: MachineFacts, now: Now, measuring: str = "", advice: str = "") -> None:
        """`measuring`: progress of a measurement, in the place of the read bandwidth."""
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(width=_LABEL, no_wrap=True, style=self.get_component_rich_style("facts--dim", partial=True))
        table.add_column(ratio=1, overflow="fold")
        for label, text in machine.rows(facts, now) + ([("advice", advice)] if advice else []):
            if label != machine.READ_BANDWIDTH:
                table.add_row(Text(label), Text(text))
            elif measuring or facts.survey is None or not self.has_class("-bars"):
                table.add_row(Text(label), Text(measuring or text))
            else:
                for number, bar in enumerate(self._bars(facts.survey, facts.theoretical)):
                    table.add_row(Text("" if number else label), bar)
        self.update(table)

    def _bars(self, survey: Survey, theoretical: Theoretical | None) -> list[Text]:
        fill, track, dim = (self.get_component_rich_style(f"facts--{part}") for part in ("fill", "track", "dim"))
        share = machine.share_of_peak(survey, theoretical)
        max_bytes_per_s = survey.all_cores.bytes_per_s / (share or 1.0)
        how = machine.how_measured(survey)
        of = how if share is None else f"{100 * share:.0f} % of {gigabytes(max_bytes_per_s)}, {how}"
        width = max(min(self.size.width - _BEFORE_BAR, _LONGEST_BAR), 8)
        sets = machine.measured_sets(survey)
        names = max(len(name) for name, _ in sets) + 1
        bars: list[Text] = []
        for name, one in sets:
            filled = min(max(round(one.bytes_per_s / max_bytes_per_s * width), 1), width)
            words = f"{name:<{names}}{gigabytes(one.bytes_per_s):>5} GB/s  "
            bars.append(Text.assemble(words, ("━" * filled, fill), ("─" * (width - filled), track)))
        bars[-1].append(f"  {of}", dim)
        return bars


_RUNS = ("fits", "tight")
_MIN_HEIGHT, _TYPICAL_BEFORE_BAR, _TYPICAL_LONGEST_BAR = 2, 56, 48


class TypicalModels(Static):
    """Draws a line per size. If there is no room for all, those around the largest that runs."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"typical--fill", "typical--dim"}
    DEFAULT_CSS = """
    TypicalModels {
        width: 100%;
        & > .typical--fill { color: $accent; }
        & > .typical--dim { color: $hint; }
    }
    """

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._machine: Machine | None = None

    @work(exclusive=True)
    async def read(self, settings: Settings, loaded: ModelInfo | None, root: Path) -> None:
        """Predict for the machine below `root`, with the memory of the loaded model given back."""
        self._machine = await run_in_daemon_thread(lambda: this_machine(settings, loaded=loaded, root=root))
        self._draw()

    def on_resize(self) -> None:
        self.visible = self.size.height >= _MIN_HEIGHT
        self._draw()

    def _draw(self) -> None:
        here = self._machine
        if here is None:
            return
        fill, dim = (self.get_component_rich_style(f"typical--{part}", partial=True) for part in ("fill", "dim"))
        self.border_title = f"What runs here · {machine.QUANTIZATION}"
        self.border_subtitle = models.doubt(here, "m")
        found = [(model, model.on(here)) for model in machine.SIZES]
        width = max(min(self.size.width - _TYPICAL_BEFORE_BAR, _TYPICAL_LONGEST_BAR), 0)
        top = max((one.tok_s or 0.0 for _, one in found), default=0.0)
        table = Table.grid(padding=(0, 2, 0, 0))
        for justify in ("left", "right", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        for model, one in self._around_the_largest(found):
            verdict = models.verdict(one)
            style = "" if verdict in _RUNS else dim
            bar = "━" * max(round((one.tok_s or 0.0) / top * width), 1) if one.tok_s and width else ""
            table.add_row(
                Text(model.name, style), Text(units.size(model.size), style), Text(verdict, style),
                Text(models.predicted_speed(one), style), Text(bar, fill),
            )  # fmt: skip
        self.update(table)

    def _around_the_largest(
        self, found: list[tuple[TypicalModel, Prediction]]
    ) -> list[tuple[TypicalModel, Prediction]]:
        room = max(self.size.height, 1)
        runs = [place for place, (_, one) in enumerate(found, 1) if models.verdict(one) in _RUNS]
        end = min(max(runs[-1] + 1 if runs else 1, room), len(found))
        return found[max(end - room, 0) : end]


_POLL_SECONDS = 0.1


async def read_costs(
    services: Services, model: ModelInfo | None, root: Path
) -> tuple[LoadedCosts | None, dict[str, str]]:
    """Return what passes of the loaded `model` cost, and the fields of `Now` about passes, CPU modules and kernels on
    the cores of the settings."""
    from cpuchat.models.cpu_modules import AUTO, engine_cpu
    from cpuchat.models.kernels import ProductLog
    from cpuchat.tune.candidates import loaded_costs

    settings, engine = services.settings, services.conversation.backend.engine
    memory, in_effect = engine.memory if engine is not None else "", services.conversation.in_effect

    def read() -> tuple[LoadedCosts | None, dict[str, str]]:
        costs = loaded_costs(model, memory, root) if model is not None else None
        kernels = ""
        if model is not None and engine is not None and model.evidence is not None:
            products = ProductLog(model.cpus, memory, engine_cpu(engine.module or AUTO)).read()
            kernels = kernels_used(model, engine, products)
        return costs, {
            "passes": passes_measured(settings, root),
            "cpu_module": cpu_module(settings, in_effect, engine),
            "kernels": kernels,
        }

    return await run_in_daemon_thread(read)


async def measure_machine(
    reader: MachineReader,
    facts: MachineFacts,
    spec: PlacementSpec,
    meant: Placement | None,
    progress: Callable[[int, int, str], None],
    cancelled: threading.Event,
) -> tuple[Survey, str]:
    """Return the survey, and a sentence about the passes ("" where these were cancelled).

    Args:
        spec: the cores in use; `meant` is what it resolves to here, None if it is impossible.

    Raises:
        ProbeFailed, OSError: the bandwidth could not be measured.
        Interrupted: cancelled during the survey.
    """
    # As the worker places its memory: on one node there is nothing to place.
    memory = meant.memory.words if meant is not None and len(facts.topology.nodes) > 1 else ""
    survey = await asyncio.to_thread(reader.survey, facts.topology, memory, progress, cancelled.is_set)
    if meant is None or survey.all_cores.disturbed:
        return survey, costs_measured(0, 0)
    probe = CostProbe(spec, progress)
    running = asyncio.ensure_future(probe_costs(probe, meant))
    while not running.done():
        await asyncio.wait({running}, timeout=_POLL_SECONDS)
        if cancelled.is_set() and not running.done():
            probe.stop()
    try:
        return survey, costs_measured(running.result(), len(meant.cpus))
    except Interrupted:
        return survey, ""
    except CpuchatError as error:
        return survey, f"Passes not measured: {error}"


_OWN = "Custom"
# By attribute of `PlacementSpec`: the label, and the setting that it is.
_LABELS = {"cores": "cores", "draft_cores": "draft", "memory": "memory", "threads": "threads"}
_FIELDS = {name: Field.of(f"{'speculation' if name == 'draft_cores' else 'engine'}.{name}") for name in _LABELS}


class PlacementList(OptionList):
    """A list in which ↑ and ↓ select; Enter belongs to the screen."""


class PlacementsPane(Vertical):
    """Posts `Edited` when a placement is selected or typed. The fields are decisive; the list only fills them in."""

    class Edited(Message):
        """Another placement is selected or typed."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._offers: tuple[PlacementOption, ...] = ()
        self._in_use = PlacementSpec()

    def compose(self) -> ComposeResult:
        yield PlacementList(id="placements", compact=True)
        with Horizontal(id="fields"):
            for name, label in _LABELS.items():
                with Horizontal(classes="field"):
                    yield Static(label, classes="label", markup=False)
                    yield Input(id=f"field-{name}", compact=True, select_on_focus=True)
        yield Static(id="problem", classes="-empty", markup=False)
        yield Static(id="about", markup=False)

    def on_mount(self) -> None:
        self.border_title = "Placement"

    def offer(self, offers: Sequence[PlacementOption], in_use: PlacementSpec) -> None:
        """Show these placements and select the one in use; the fields keep what was typed."""
        typed = self.words() if self._offers else None
        keep = typed is not None and typed != self._words_of(self._in_use)
        self._offers, self._in_use = tuple(offers), in_use
        wanted = typed if keep and typed is not None else self._words_of(in_use)
        self._put(wanted)

    def reset(self, in_use: PlacementSpec) -> None:
        self._in_use = in_use
        self._put(self._words_of(in_use))

    def tell(self, text: Text | str) -> None:
        self.query_one("#about", Static).update(text)

    def show_problems(self, problems: dict[str, str]) -> None:
        """Show the problem of the focused field, else the first one."""
        for name in _LABELS:
            self.query_one(f"#field-{name}", Input).set_class(name in problems, "-invalid")
        line = self.query_one("#problem", Static)
        focused = (
            (self.screen.focused.id or "").removeprefix("field-") if isinstance(self.screen.focused, Input) else ""
        )
        first = focused if focused in problems else next(iter(problems), "")
        if first:
            line.update(f"! {_LABELS[first]}: {problems[first]}")
        else:
            line.update(f"{_LABELS[focused]}: {_FIELDS[focused].rule}" if focused else "")
        line.set_class(bool(first), "-invalid")
        line.set_class(not first and not focused, "-empty")

    def words(self) -> dict[str, str]:
        return {name: self.query_one(f"#field-{name}", Input).value.strip() for name in _LABELS}

    @property
    def own_marked(self) -> bool:
        """Return whether the last line is selected: the fields hold none of the placements."""
        return self.query_one(PlacementList).highlighted == len(self._offers)

    def focus_words(self) -> None:
        self.query_one("#field-cores", Input).focus()

    def mark(self, spec: PlacementSpec) -> None:
        """Select a placement as the arrow keys would."""
        self._put(self._words_of(spec))
        self.post_message(self.Edited())

    @staticmethod
    def _words_of(spec: PlacementSpec) -> dict[str, str]:
        return {name: str(getattr(spec, name)) for name in _LABELS}

    def _put(self, words: dict[str, str]) -> None:
        self._fill(words)
        self._list(words)

    def _fill(self, words: dict[str, str]) -> None:
        with self.prevent(Input.Changed):
            for name in _LABELS:
                self.query_one(f"#field-{name}", Input).value = words[name]

    def _list(self, words: dict[str, str]) -> None:
        options = self.query_one(PlacementList)
        width = (options.size.width or self.size.width - 2) - 2  # where the scroll bar comes, if it comes
        with self.prevent(OptionList.OptionHighlighted):
            options.clear_options()
            options.add_options([Option(self._line(offer, width)) for offer in self._offers])
            known = [self._words_of(offer.spec) for offer in self._offers]
            mark = "●" if self._words_of(self._in_use) not in known else "○"
            options.add_option(Option(Text(f"{mark} {_OWN}", style="italic")))
            options.highlighted = known.index(words) if words in known else len(known)

    def _line(self, offer: PlacementOption, width: int) -> Text:
        in_use = self._words_of(offer.spec) == self._words_of(self._in_use)
        marks = " · ".join(filter(None, ("in use" if in_use else "", "recommended" if offer.recommended else "")))
        right = f"{offer.speed:>13}"
        room = max(width - len(right) - 2, 12)
        name = Text.assemble((offer.name, "bold" if in_use else ""), (f"  {marks}" if marks else "", "dim"))
        name.truncate(room, overflow="ellipsis", pad=True)
        return Text.assemble("● " if in_use else "○ ", name, right, no_wrap=True)

    def on_resize(self) -> None:
        if self._offers:
            self.call_after_refresh(lambda: self._list(self.words()))

    @on(OptionList.OptionHighlighted)
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        if event.option_index < len(self._offers):
            self._fill(self._words_of(self._offers[event.option_index].spec))
        self.post_message(self.Edited())

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_index == len(self._offers):
            self.focus_words()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        event.stop()
        words = self.words()
        known = [self._words_of(offer.spec) for offer in self._offers]
        with self.prevent(OptionList.OptionHighlighted):
            self.query_one(PlacementList).highlighted = known.index(words) if words in known else len(known)
        self.post_message(self.Edited())

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        self.post_message(self.Edited())


def spec_of(words: dict[str, str]) -> tuple[PlacementSpec | None, dict[str, str]]:
    """Parse the fields; returns the placement, and what is wrong by field."""
    try:
        number = _FIELDS["threads"].parse(words["threads"] or "0")
    except ValueError as error:
        return None, {"threads": str(error)}
    cores, draft_cores, memory = (words[name] or "auto" for name in ("cores", "draft_cores", "memory"))
    return PlacementSpec(cores, draft_cores, memory, threads=number), {}
