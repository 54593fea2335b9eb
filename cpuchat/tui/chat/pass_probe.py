"""Measures once what passes cost on this machine, while the app is idle: the basis of all predicted speeds."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from textual.screen import Screen

from cpuchat.base.errors import CpuchatError, Interrupted
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.config.servers import running_servers
from cpuchat.tui.chat.idle import IdleProbe
from cpuchat.tui.services import Services

if TYPE_CHECKING:
    from cpuchat.bench.cost_probe import CostProbe
    from cpuchat.conversation import Conversation
    from cpuchat.hardware.placement.placement import Placement, PlacementSpec
    from cpuchat.telemetry.machine import Peak

CHECK_SECONDS = 5.0
IDLE_CHECKS = 6
"""Consecutive checks that must find the app and the cores idle."""
_MEMORY = 2_000_000_000
"""Bytes that must be available beside the loaded model and what is spared: the largest model of the probe takes 0.5 GB,
its repacked copy as much."""
_BEGUN = "Measuring this machine once (20 s) to predict speeds; any key cancels."
_ENDED = "Pass costs measured: predictions now use them (F12 shows details)."
_DISTURBED = "Pass costs not measured: other programs are running; trying again in an hour."


async def show_ceiling(conversation: Conversation) -> None:
    """Show the ceilings of the loaded model by the passes that were measured on its cores, too."""
    model, engine = conversation.model, conversation.backend.engine
    if model is None or model.server or model.engine:
        return
    from cpuchat.models.machine import reach_of

    memory = engine.memory if engine is not None else ""
    reach = await run_in_daemon_thread(lambda: reach_of(model, memory))
    if conversation.model is model:
        conversation.meter.predicted(reach)


class PassProbe(IdleProbe):
    """Measures the cores of the settings, unless `hardware.probe` is off or the models run on a server.

    It waits while other programs compute or serve models, and gives way when they begin to.

    Args:
        is_idle: nothing runs, and nobody types.
    """

    name = "pass-probe"

    def __init__(self, screen: Screen[Any], services: Services, is_idle: Callable[[], bool]) -> None:
        super().__init__(screen, services, is_idle, CHECK_SECONDS, IDLE_CHECKS)
        self._known: PlacementSpec | None = None
        self._retry_at = 0.0
        self._reported: set[str] = set()
        self._probe: CostProbe | None = None
        services.on_input = self.interrupt

    @property
    def done(self) -> bool:
        """Return whether the cores of the settings are measured, or cannot be."""
        from cpuchat.hardware.placement.placement import PlacementSpec

        return self._known == PlacementSpec.of(self._services.settings)

    def _is_wanted(self) -> bool:
        model = self._services.conversation.model
        on_server = model is not None and bool(model.server)
        wanted = self._services.settings.hardware.probe and not on_server and not self.done
        return wanted and monotonic() >= self._retry_at

    def interrupt(self) -> None:
        """Stop at once without waiting; begin again when the app is idle."""
        self._idle, self._stopped = 0, True
        if self._probe is not None:
            self._probe.stop()

    async def _cancel(self) -> None:
        self.interrupt()
        if self._probe is None and self._worker is not None:
            self._worker.cancel()  # nothing waits for the threads that read, or fit

    async def _measure(self) -> None:
        from cpuchat.hardware.placement.placement import PlacementSpec

        spec, pid = PlacementSpec.of(self._services.settings), self._services.conversation.backend.pid
        try:
            placement = await run_in_daemon_thread(lambda: _to_measure(spec))
            if placement is None:
                self._known = spec
            elif not self._stopped and await run_in_daemon_thread(lambda: _is_free(pid)):
                await self._measure_cores(spec, placement)
        except Interrupted:
            pass
        except (CpuchatError, OSError) as error:
            if not self._stopped:
                self._known = spec
                if _BEGUN in self._reported:
                    self._report_once(f"Pass costs not measured: {clean_line(str(error))}")
        finally:
            self._probe = None

    async def _measure_cores(self, spec: PlacementSpec, placement: Placement) -> None:
        from cpuchat.bench.cost_probe import CostProbe, save_passes
        from cpuchat.hardware.bandwidth.read_bandwidth import RETRY_SECONDS

        peak, fitted = await run_in_daemon_thread(lambda: self._peak(placement)), None
        if self._stopped:
            return
        if peak is not None:
            self._report_once(_BEGUN)
            self._probe = CostProbe(spec, gives_way=True)
            found = await self._probe.run()
            self._probe = None
            fitted = await run_in_daemon_thread(lambda: save_passes(found, placement, peak.bytes_per_s))
        if fitted is None:
            self._retry_at = monotonic() + RETRY_SECONDS
            self._report_once(_DISTURBED)
            return
        self._known = spec
        await show_ceiling(self._services.conversation)
        self._screen.notify(_ENDED, markup=False)

    def _report_once(self, notice: str) -> None:
        if notice not in self._reported:
            self._reported.add(notice)
            self._screen.notify(notice, timeout=10, markup=False)

    def _peak(self, placement: Placement) -> Peak | None:
        """Return the read bandwidth of these cores, measured if it is not known; None beside other programs."""
        from cpuchat.hardware.bandwidth.read_bandwidth import known_peak, peak_of

        cpus, memory = placement.cpus, placement.memory.words
        peak_of(cpus, memory, retry_after=0.0, cancelled=lambda: self._stopped)
        return known_peak(cpus, memory, disturbed=False)


def _to_measure(spec: PlacementSpec) -> Placement | None:
    """Return where `spec` computes; None when the passes there are known.

    Raises:
        UsageError: this machine does not have these cores.
    """
    from cpuchat.hardware.placement.placement import place
    from cpuchat.hardware.topology import read_topology
    from cpuchat.models.costs import CostLog

    placement = place(read_topology(), spec)
    return None if CostLog(placement.cpus, placement.memory.words).read().probe else placement


def _is_free(pid: int | None) -> bool:
    """Return whether no server of this user is running, and memory is available without dropping pages of the file that
    the worker `pid` has loaded."""
    from cpuchat.hardware.memory import available_bytes, total_bytes
    from cpuchat.models.prediction import spare_bytes
    from cpuchat.telemetry.machine import process_memory

    if running_servers():
        return False
    worker = process_memory(pid) if pid is not None else None
    mapped = worker.shared if worker is not None else 0
    return available_bytes() - mapped >= spare_bytes(total_bytes()) + _MEMORY
