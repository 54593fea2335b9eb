"""The hardware screen: topology, cores in use, read bandwidth, and choosing another placement."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.containers import Container, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import OptionList, Static

from cpuchat.base.errors import CpuchatError, Interrupted, MeasureFailed
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.config.servers import last_here
from cpuchat.hardware.diagnostics import DiagnosticFacts, gather_facts
from cpuchat.hardware.memory import available_bytes, available_within
from cpuchat.hardware.numa.residency import Residency, read_residency
from cpuchat.hardware.placement.cores import MAX_BUSY_CORES, BusyCores
from cpuchat.hardware.placement.placement import (
    Placement,
    PlacementCandidate,
    PlacementError,
    PlacementSpec,
    offered,
    place,
)
from cpuchat.hardware.process import BusyPrograms
from cpuchat.hardware.sysfs import clock
from cpuchat.hardware.topology import ROOT, Topology
from cpuchat.measure import store
from cpuchat.measure.peak import SLICE, WINDOWS, Cancelled, known_of, one_at_a_time, sets_of, slices
from cpuchat.present import machine
from cpuchat.present.answers import percent_done
from cpuchat.present.machine import CpuUse, Now
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.session.activity import Activity
from cpuchat.session.placement import PlacementChange
from cpuchat.telemetry.machine import Peaks
from cpuchat.telemetry.units import plural
from cpuchat.tui.hardware.panels import Bars, FactsTable, PlacementList
from cpuchat.tui.hardware.picture import ROOMY, MachinePicture, Use
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter

if TYPE_CHECKING:
    from cpuchat.models.kernels import MeasuredProducts

Computing = tuple[tuple[int, ...], str]
"""(logical CPUs, memory policy in the words of `mempolicy`)"""

SAMPLE_SECONDS = 1.0
_FEWEST_CORES, _FEW_CORES, _MAX_CORES, _WIDE = 2, 8, 24, 154  # shown one by one; the most in so many columns
_OTHER_ROWS, _MAX_ROWS = 36, 8  # that all but the cores take, and the most that show the past of one
_MAX_PAST = 400  # seconds of it, two for each column
_PATIENCE = 2.0  # seconds that a slice of another window's measurement may last
_FIRST_SAMPLE_SECONDS = 0.15  # the counters are being opened until then
_FIRST, _HOLD, _MUCH = 2, 10, 0.2  # samples until programs are named, and anew; what they take of a CPU of the model


class MachineReader:
    """Reads the machine below `root`. Blocks: call it in threads."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._busy, self._programs = BusyCores(root), BusyPrograms(root)
        self._busy.shares()  # since when the first are told
        self._programs.own_ticks()
        self._programs.names()
        self._others, self._taken, self._wait = tuple[str, ...](), list[Mapping[int, CpuUse]](), _FIRST

    def facts(self, spec: PlacementSpec, loaded: Computing | None = None) -> DiagnosticFacts:
        """Read the machine with the settings `spec`; counters and the kernel's refusals are not tried. The bandwidth is
        that of the cores of the `loaded` model, which may be tuned, else of the settings'."""

        def known(topology: Topology, cpus: tuple[int, ...], policy: str, *, root: Path) -> Peaks:
            return known_of(topology, *(loaded or (cpus, policy)), root=root)

        return gather_facts(spec, refused=lambda _: "", counts=False, known=known, root=self.root)

    def placement(self, pid: int, files: Collection[Path]) -> Residency | None:
        """Return where the worker's memory is; None where the kernel does not report it."""
        return read_residency(pid, files, self.root)

    def cores(self, topology: Topology) -> dict[int, CpuUse]:
        """Return how busy each logical CPU was since the last call, and its clock, of a few."""
        shares, own, few = self._busy.shares(), self._programs.own_ticks(), len(topology.cores) <= _MAX_CORES
        found = dict[int, CpuUse]()
        for cpu in topology.online:
            busy, one = shares.get(cpu, 0.0), clock(self.root, (cpu,)) if few else None
            mine = min(own[cpu] / self._busy.ticks.get(cpu, 1.0), busy) if busy else 0.0
            found[cpu] = CpuUse(busy, mine, one.high if one is not None else 0)
        self._taken.append(found)
        return found

    def _others_on(self, cpus: Sequence[int]) -> tuple[str, ...]:
        """Return the other programs that computed most while some of these CPUs were theirs; the same for a while, so
        that they can be read."""
        if len(self._taken) >= self._wait:
            taken = [sum(one[cpu].busy - one[cpu].own for one in self._taken if cpu in one) for cpu in cpus]
            names = self._programs.names(sum(taken) / len(self._taken))
            self._others = names if max(taken, default=0.0) > _MUCH * len(self._taken) else ()
            self._wait = _HOLD if self._others else _FIRST
            self._taken.clear()
        return self._others

    def now(self, facts: DiagnosticFacts, on: Computing, seen: object) -> tuple[DiagnosticFacts, object]:
        """Return facts with what is known of the bandwidth `on` cores, the clock and the free memory, now; and what has
        been `seen` then, for the next call."""
        now = store.stamp(), on
        peaks = facts.peaks
        if now != seen:  # estimates read the whole topology
            peaks = known_of(facts.topology, *on, root=self.root)
        available, nodes = available_bytes(self.root), facts.free_on
        free_on = {number: available_within((number,), self.root) for number in nodes}
        speed, others = clock(self.root, on[0]), self._others_on(on[0])
        new = dict[str, Any](peaks=peaks, clock=speed, others=others, available=available, free_on=free_on)
        return dataclasses.replace(facts, **new), now

    def kernels(self, on: Computing | None, module: str) -> tuple[str, Mapping[str, MeasuredProducts]]:
        """Return the instruction set of cpuchat's kernels in a CPU `module` ("": the usual one), "" where they do not
        run; and what was measured `on` cores, by type of weights."""
        from cpuchat.models.cpu_modules import AUTO, engine_cpu
        from cpuchat.models.kernels import ProductLog, instructions_used

        cpu = engine_cpu(module or AUTO)
        return instructions_used(cpu), ProductLog(*on, cpu).read() if on is not None else {}

    def measure(self, topology: Topology, on: Computing, cancelled: Cancelled) -> Iterator[str]:
        """Measure the bandwidth `on` cores in slices; yield what is done before each. Raises CpuchatError: it cannot be
        measured; Interrupted: `cancelled` said so."""
        sets = [*dict.fromkeys(some for some in sets_of(topology, on[0]).values() if some)]
        total, policy = len(sets) * WINDOWS // SLICE, on[1]
        with one_at_a_time(_PATIENCE) as is_ours:
            if not is_ours:
                raise MeasureFailed("Another window of cpuchat is measuring.", "Try again in a minute.")
            for done, some in enumerate(slices(sets, policy, cancelled=cancelled, root=self.root)):
                yield f"measuring {plural(len(some), 'core')} · {100 * done / total:.0f} % · Esc stops"


class HardwareScreen(Dismissable[None], keys="hardware"):
    """Shows the machine and its placements, and loads the model in the selected one, in place of the chat's answers.
    `facts` is None while the machine is being read; `now` follows the worker and the counters."""

    CSS_PATH = "hardware.tcss"
    AUTO_FOCUS = "#placements"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-narrow"), (100, "-middle")]
    VERTICAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-low"), (30, "-high")]

    def __init__(self, services: Services, reader: MachineReader | None = None) -> None:
        super().__init__()
        self.reader = reader or MachineReader()
        self.facts: DiagnosticFacts | None = None
        self.now = Now()
        self._services = services
        self._conversation = services.conversation
        self._change: PlacementChange | None = None
        self._measuring = ""  # how far a measurement is
        self._result = ""  # of the last one
        self._beside = False  # other programs computed meanwhile
        self._seen: object = None  # of what was measured
        self._is_looking = False
        self._stopped = False
        self._past = deque[Mapping[int, CpuUse]](maxlen=_MAX_PAST)  # of `now.cores`
        self._about: PlacementSpec | None = None  # what the lines at the bottom are about
        self._outcome_told = False  # the lines at the bottom are about a change
        self._options: list[PlacementCandidate] = []
        self._used: dict[PlacementSpec, None] = {}  # while this screen is open

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="machine") as pane:
            pane.border_title = "Hardware"
            with Vertical(id="answer"):
                yield Bars(id="speed")
                yield FactsTable(id="help")
            with Container(id="drawn"):
                with Vertical():
                    yield MachinePicture(id="picture")
                    yield Bars(id="cores")
                with Container(id="charts"):
                    yield Bars(id="bandwidth")
                    yield Bars(id="kernels")
            yield FactsTable(id="facts")
        with Vertical(id="where") as where:
            where.border_title = "Placement"
            yield PlacementList()
            yield Static(id="about", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self._read_facts()
        self.set_interval(SAMPLE_SECONDS, self._sample)
        self.set_timer(_FIRST_SAMPLE_SECONDS, self._sample)

    def on_resize(self) -> None:
        self.call_after_refresh(self._show)

    @property
    def _in_use(self) -> PlacementSpec:
        return PlacementSpec.of(self._conversation.in_effect)

    @property
    def _loaded(self) -> Computing | None:
        """Return where the loaded model computes, which may be tuned; None without one."""
        model, engine = self._model, self._conversation.backend.engine
        return (model.cpus, engine.memory_policy) if model is not None and model.cpus and engine is not None else None

    @property
    def _on(self) -> Computing | None:
        """Return where the loaded model computes, else one with the settings would; None if that is impossible."""
        placed = self.facts.placement if self.facts is not None else None
        return self._loaded or (placed and (placed.cpus, placed.memory_policy.words))

    @property
    def _model(self) -> ModelInfo | None:
        """Return the loaded model; None for one on a server, which computes elsewhere."""
        model = self._conversation.model
        return None if model is None or model.server else model

    @property
    def _is_loading(self) -> bool:
        session = self._services.session
        return session.activity is Activity.LOADING and isinstance(session.source, Path)

    @property
    def _load_progress(self) -> str:
        """Return `loading 40 %`; "" while nothing is loaded."""
        share = self._conversation.figures().load_fraction
        done = "" if share is None else f" {percent_done(share)} %"
        return f"loading{done}" if self._is_loading else ""

    @work(exclusive=True, group="facts")
    async def _read_facts(self) -> None:
        is_first, spec, loaded = self.facts is None, PlacementSpec.of(self._services.settings), self._loaded
        self.facts, self._seen = await asyncio.to_thread(self.reader.facts, spec, loaded), None
        if is_first:
            self._refresh_now()
        self._show()
        await self._services.session.show_ceiling()  # the chat's figures rest on the same bandwidth then

    def _refresh_now(self) -> None:
        """Read the state of the worker that runs now."""
        backend, model = self._conversation.backend, self._model
        engine = backend.engine if backend.pid or model else None
        counting = self._services.settings.hardware.counters
        self.now = dataclasses.replace(
            self.now, model=model, loading=self._load_progress, engine=engine, counting=counting, placement=None,
            placed=False,
        )  # fmt: skip
        if self.facts is None or not self.has_widgets:
            return
        self._sample()
        if backend.pid is not None and model is not None:
            self._read_placement(backend.pid, [Path(model.path)])
        self.query_one("#machine").border_title = Content(machine.title(self.facts))
        self._outcome_told = False
        self._used[self._in_use] = None
        self._options = offered(self.facts.topology, self._used)
        self.query_one(PlacementList).offer(self._options, self._used, self._in_use)
        self.set_class(len({*(one.spec for one in self._options), *self._used}) == 1, "-one")
        if not self._outcome_told:
            self._about = None
            self._marked()
        self._read_words()
        self._show()

    @work(exclusive=True, group="placement")
    async def _read_placement(self, pid: int, files: list[Path]) -> None:
        placement = await asyncio.to_thread(self.reader.placement, pid, files)
        if pid == self._conversation.backend.pid:
            self.now = dataclasses.replace(self.now, placement=placement, placed=True)
            self._show()

    def _sample(self) -> None:
        if self.facts is None:
            return
        if self._change is None and bool(self.now.loading) != self._is_loading:
            self._refresh_now()  # a load of the chat has begun or ended
            return
        sample = self._services.machine_watch.sample() if self.now.counting else None
        figures = self._conversation.figures()
        answered = figures if self._model is not None else None
        traffic, reads = None, figures.roofline.bandwidth.value
        if sample is not None and sample.bandwidth is not None:
            traffic = sample.bandwidth.total, sample.bandwidth.source
        elif reads is not None and figures.phase == "decoding":
            traffic = reads, "≈ in this answer"
        now = dataclasses.replace(
            self.now, sample=sample or self.now.sample, answered=answered, traffic=traffic, loading=self._load_progress
        )
        if now != self.now:
            self.now = now
            self._show()
        if not self._is_looking and (on := self._on) is not None:
            self._is_looking = True
            self._look(self.facts, on)

    @work(group="look")
    async def _look(self, before: DiagnosticFacts, on: Computing) -> None:
        """Read what changes by itself: clock, bandwidth, and which cores other programs use."""
        try:
            facts, seen, cores = await run_in_daemon_thread(
                lambda: (*self.reader.now(before, on, self._seen), self.reader.cores(before.topology))
            )
        finally:
            self._is_looking = False
        busy = frozenset(cpu for cpu, one in cores.items() if one.busy - one.own > MAX_BUSY_CORES)
        working = frozenset(cpu for cpu, one in cores.items() if one.own > MAX_BUSY_CORES)
        if self._loaded and self._conversation.activity.is_streaming:
            working |= {*self._loaded[0]}
        self._beside = self._beside or bool(busy)
        if self.facts is not before:
            return
        has_news, self._seen = seen != self._seen, seen
        self._past.append(self.now.cores)
        now = dataclasses.replace(self.now, cores=cores, busy=busy, working=working)
        if (facts, now) != (before, self.now):
            self.facts, self.now = facts, now
            self._show()
        if has_news:
            self._read_words()  # an answer or a measurement was kept, on which the model's speed rests

    def _cpus_of(self, spec: PlacementSpec) -> tuple[int, ...]:
        if (model := self.now.model) is not None and model.cpus and spec == self._in_use:
            return model.cpus
        placed = self._placement(spec)
        return placed.cpus if placed is not None else ()

    def _show(self) -> None:
        if not self.has_widgets or self.facts is None:
            return
        facts, now = self.facts, dataclasses.replace(self.now, measuring=bool(self._measuring))
        n_cores, size = len(facts.topology.cores), self.app.size
        few = _MAX_CORES if size.width >= _WIDE else _FEWEST_CORES if self.has_class("-narrow") else _FEW_CORES
        has_room = n_cores <= few
        self.set_class(has_room, "-few")
        self._show_picture()
        self.query_one("#speed", Bars).show(machine.speed_chart(now))
        self.query_one("#help", FactsTable).show(machine.helping(facts, now, 3 if size.height >= ROOMY else 1))
        n_rows = min((size.height - _OTHER_ROWS) // n_cores, _MAX_ROWS)
        cores = machine.core_chart(facts.topology, now, self._past if n_rows > 1 else ()) if has_room else None
        self.query_one("#cores", Bars).show(cores, n_rows)
        slowed = " · slow beside other programs" if self._measuring and now.busy else ""
        told = f"{self._measuring}{slowed}" or self._result
        self.query_one("#bandwidth", Bars).show(machine.bandwidth_chart(facts, now, told))
        self.query_one("#kernels", Bars).show(now.kernels if now.kernels is not None and now.kernels.bars else None)
        of_model, of_machine = machine.rows(facts, now)
        self.query_one("#facts", FactsTable).show(of_model + of_machine)

    def _show_picture(self) -> None:
        if (facts := self.facts) is None:
            return
        spec = self.query_one(PlacementList).marked
        cpus = self._cpus_of(spec)
        use = Use(cpus, self.now.busy, self.now.working) if cpus else Use()
        self.query_one(MachinePicture).show(facts.topology, use)
        name = next((one.name for one in self._options if one.spec == spec), "custom")
        state = (self.now.loading or "in use") if spec == self._in_use else "not in use"
        self.query_one("#machine").border_subtitle = Content(f"{state}: {name}")

    @work(exclusive=True, group="words")
    async def _read_words(self) -> None:
        """Read what is known of the model, of passes, CPU modules and kernels on the cores of the settings."""
        settings, model, on = self._services.settings, self._model, self._on
        engine, known = self._conversation.backend.engine, self.facts and self.facts.peaks.all_cores

        def kernels() -> machine.Chart:
            module = engine.module if engine is not None else ""
            return machine.kernel_chart(*self.reader.kernels(on, module), known, model)

        passes, used, here = await run_in_daemon_thread(
            lambda: (machine.passes_measured(settings, self.reader.root), kernels(), self._read_model())
        )
        self.now = dataclasses.replace(self.now, passes=passes, kernels=used, here=here, is_read=True)
        self._show()

    def _read_model(self) -> machine.ModelHere | None:
        """Return what the model that is or will be loaded, else the one used last, does here. Blocks."""
        services, loaded, wanted = self._services, self._model, self._services.session.source
        with contextlib.suppress(CpuchatError):
            path = Path(loaded.path) if loaded is not None else wanted if isinstance(wanted, Path) else None
            if path is None and (last := last_here(services.settings.model.last)):
                path = services.library.resolve(last)
            if path is not None:
                return machine.model_here(path, services.settings, services.library, loaded)
        return None

    def _placement(self, spec: PlacementSpec) -> Placement | None:
        """Return `spec` resolved here; None while the machine is unknown, or if it is impossible."""
        if self.facts is None:
            return None
        try:
            return place(self.facts.topology, spec)
        except PlacementError:
            return None

    @on(OptionList.OptionHighlighted)
    def _marked(self) -> None:
        self._show_picture()
        spec = self.query_one(PlacementList).marked
        if self._change is None and spec != self._about:
            self._about, self._outcome_told = spec, False
            lines: list[str] = []
            if self.facts is not None and (meant := self._placement(spec)) is not None:
                choice = next((one for one in self._options if one.spec == spec), None)
                lines = [choice.reason if choice is not None else meant.reason, *meant.notes]
                if len(self.facts.topology.nodes) > 1:
                    lines.append(f"memory: {meant.memory_policy.words}, {meant.policy_reason}")
            self.query_one("#about", Static).update(Text("\n".join(filter(None, lines))))
        self.refresh_bindings()

    def _tell(self, text: str, strong: bool = False) -> None:
        self.query_one("#about", Static).update(Text(text, style="bold" if strong else ""))
        self._about, self._outcome_told = self.query_one(PlacementList).marked, True

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "apply":
            return False if self.has_class("-one") else (self.facts is not None and self._change is None) or None
        return True

    def action_apply(self) -> None:
        if self.facts is None or self._change is not None:
            return
        spec = self.query_one(PlacementList).marked
        if spec == self._in_use:
            self._tell("Already in use.")
        elif self._services.session.busy:
            self._refuse("change the placement")
        else:
            self._load(spec)

    def _load(self, spec: PlacementSpec) -> None:
        conversation = self._conversation
        if self._model is None:
            conversation.settings = spec.applied_to(conversation.settings)
            self._services.save_settings(spec.changes())
            self._refresh_now()
            self._read_facts()
            self._tell("Saved. Takes effect on the next load.")
            return
        change = self._change = PlacementChange(conversation, spec, self._loading)
        self._services.session.measure(self._run_change(change), change.leave)
        self.refresh_bindings()

    async def _run_change(self, change: PlacementChange) -> None:
        try:
            problem = await change.run()
        finally:
            self._change = None
        if not problem:
            self._services.save_settings(change.wanted.changes())
        if not self.has_widgets:
            return
        self._refresh_now()
        self._read_facts()
        self.query_one(PlacementList).mark(self._in_use)
        kept = "No model is loaded now." if self._conversation.model is None else "Nothing was changed."
        self._tell(f"{problem}\n{kept}" if problem else "Applied.", strong=True)
        self.refresh_bindings()

    def _loading(self, share: float) -> None:
        if self.has_widgets and self._change is not None and not self._change.stopped:
            self._tell(f"reloading the model {100 * share:3.0f} % · Esc cancels")

    def action_page(self, pages: int) -> None:
        pane = self.query_one("#machine")
        pane.scroll_relative(y=pages * max(pane.scrollable_content_region.height - 1, 1), animate=False)

    def action_measure(self) -> None:
        if self.facts is None or self._measuring:
            return
        if self._services.session.busy:
            self._refuse("measure")
        elif (on := self._on) is None:
            self.notify("The configured cores cannot be used. Choose a placement below.", severity="warning")
        else:
            self._measuring, self._stopped, self._result, self._beside = "measuring…", False, "", False
            self._services.session.measure(self._measure(self.facts, on), self._stop_measuring)
            self._show()
            self.query_one("#bandwidth").scroll_visible(animate=False)

    def _refuse(self, what: str) -> None:
        """Say what runs, so that `what` cannot be done now."""
        activity = self._services.session.activity
        until = "the answer is done (Esc in the chat stops it)"
        if self._measuring:
            until = "the bandwidth is measured (Esc stops it)"
        elif self._change is not None:
            until = "the model is loaded (Esc cancels)"
        elif activity is Activity.LOADING:
            until = "the model is loaded (Esc in the chat cancels)"
        self.notify(f"You can {what} when {until}.", severity="warning")

    def _stop_measuring(self) -> None:
        self._stopped = True

    async def _measure(self, before: DiagnosticFacts, on: Computing) -> None:
        steps = self.reader.measure(before.topology, on, lambda: self._stopped)
        try:
            while self._measuring:
                self._measuring = await run_in_daemon_thread(lambda: next(steps, ""))
                self._show()
            after, _ = await run_in_daemon_thread(lambda: self.reader.now(before, on, None))
            self._result = machine.measured_anew(before.peaks.all_cores, after.peaks.all_cores, self._beside)
        except Interrupted:
            pass
        except CpuchatError as error:
            self.notify(str(error), severity="warning", markup=False)
        finally:
            self._measuring, self._stopped = "", True
            if self.has_widgets:
                self._sample()
                self._show()
                self.call_after_refresh(self.query_one("#bandwidth").scroll_visible, animate=False)

    async def action_close(self) -> None:
        if self._measuring:
            self._stop_measuring()
        elif self._change is not None:
            self._tell("Stopping…")
            await self._change.stop()
        else:
            self.dismiss(None)
