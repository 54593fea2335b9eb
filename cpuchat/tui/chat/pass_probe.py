"""Measures once what passes cost on this machine, while the app is idle: the basis of all predicted speeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from textual.screen import Screen

from cpuchat.errors import CpuchatError, Interrupted
from cpuchat.tui.chat.idle import IdleProbe
from cpuchat.tui.services import Services
from cpuchat.tui.threads import run_in_daemon_thread

if TYPE_CHECKING:
    from cpuchat.bench.cost_probe import CostProbe
    from cpuchat.conversation import Conversation
    from cpuchat.hardware.placement.placement import Placement
    from cpuchat.settings import Settings
    from cpuchat.telemetry.machine import Peak

CHECK_SECONDS = 5.0
IDLE_CHECKS = 6
"""Consecutive checks that must find the app idle."""
_BEGUN = "Measuring this machine once (20 s) to predict speeds; any key cancels."
_ENDED = "Pass costs measured: predictions now use them (F12 shows details)."


async def show_ceiling(conversation: Conversation) -> None:
    """Show the compute ceiling of the loaded model, by the passes that were measured on its cores."""
    model, engine = conversation.model, conversation.backend.engine
    if model is None or model.server:
        return
    from cpuchat.models.machine import compute_rate

    memory = engine.memory if engine is not None else ""
    rate = await run_in_daemon_thread(lambda: compute_rate(model, memory))
    if rate and conversation.model is model:
        conversation.meter.computes(rate)


class PassProbe(IdleProbe):
    """Measures the cores of the settings, unless `hardware.probe` is off. `done`: they are measured, or cannot be now.

    Args:
        is_idle: nothing runs, and nobody types.
    """

    name = "pass-probe"

    def __init__(self, screen: Screen[Any], services: Services, is_idle: Callable[[], bool]) -> None:
        super().__init__(screen, is_idle, CHECK_SECONDS, IDLE_CHECKS)
        self._services = services
        self.done = self._told = False
        self._probe: CostProbe | None = None
        services.on_input = self.interrupt

    def _is_wanted(self) -> bool:
        return not self.done and self._services.settings.hardware.probe

    def interrupt(self) -> None:
        """Stop at once without waiting; begin again when the app is idle."""
        self._idle, self._stopped = 0, True
        if self._probe is not None:
            self._probe.stop()

    async def _cancel(self) -> None:
        self.interrupt()

    async def _measure(self) -> None:
        from cpuchat.bench.cost_probe import CostProbe, probe_costs
        from cpuchat.hardware.placement.placement import PlacementSpec

        settings = self._services.settings
        try:
            placement = await run_in_daemon_thread(lambda: _to_measure(settings))
            if placement is None:
                self.done = True
                return
            peak = await run_in_daemon_thread(lambda: self._peak(placement))
            if peak is None or self._stopped:
                self.done = not self._stopped  # other programs run
                return
            self._tell_once()
            self._probe = CostProbe(PlacementSpec.of(settings))
            fitted = await probe_costs(self._probe, placement, peak.bytes_per_s)
            self.done = True
            if fitted is not None:
                await show_ceiling(self._services.conversation)
                self._screen.notify(_ENDED, markup=False)
        except Interrupted:
            pass
        except (CpuchatError, OSError):
            self.done = not self._stopped
        finally:
            self._probe = None

    def _tell_once(self) -> None:
        if not self._told:
            self._told = True
            self._screen.notify(_BEGUN, timeout=10, markup=False)

    def _peak(self, placement: Placement) -> Peak | None:
        """Return the read bandwidth of these cores, measured if it is not known; None beside other programs."""
        from cpuchat.hardware.bandwidth.peaks import known_peak, peak_of

        peak_of(placement.cpus, placement.memory.words, cancelled=lambda: self._stopped)
        return known_peak(placement.cpus, placement.memory.words, disturbed=False)


def _to_measure(settings: Settings) -> Placement | None:
    """Return where the settings compute; None when the passes there are known.

    Raises:
        UsageError: this machine does not have these cores.
    """
    from cpuchat.hardware.placement.placement import PlacementSpec, place
    from cpuchat.hardware.topology import read_topology
    from cpuchat.models.costs import CostLog

    placement = place(read_topology(), PlacementSpec.of(settings))
    return None if CostLog(placement.cpus, placement.memory.words).read().probe else placement
