"""Work of the chat screen for idle time, which gives way to everything: the read bandwidth, and what passes cost on
this machine, the basis of all predicted speeds.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from textual.screen import Screen
from textual.worker import Worker

from cpuchat.base.errors import CpuchatError, Interrupted
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.config.servers import running_servers
from cpuchat.hardware.memory import available_bytes, total_bytes
from cpuchat.hardware.placement.cores import MAX_BUSY_CORES, BusyCores
from cpuchat.hardware.placement.placement import Placement, PlacementSpec, place
from cpuchat.hardware.process import process_memory
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.hardware.topology import read_topology
from cpuchat.measure import peak
from cpuchat.models.costs import CostLog
from cpuchat.session.chat import ChatSession
from cpuchat.tui.chat.reader import Reader
from cpuchat.tui.services import Services
from cpuchat.tui.threads import result_of

if TYPE_CHECKING:
    from cpuchat.bench.cost_probe import CostProbe

_Subject = tuple[PlacementSpec, tuple[int, ...]]  # the cores of the settings, and those of the loaded model
_MEMORY = 2_000_000_000
"""Bytes that must be available beside the loaded model and what is spared: the largest model of the probe takes 0.5 GB,
its repacked copy as much."""
RETRY_SECONDS, RAISED_SECONDS = 60.0, 3600.0
"""Until what other programs disturbed or prevented is measured again, and what an answer raised, or what failed."""


class PassProbe:
    """Measures the cores of the settings once, and the read bandwidth of those that the loaded model computes on; not
    with `hardware.probe` off, and not for models on a server.

    All of it in slices of under a second, which add up over runs of the app: one of the read bandwidth after each check
    that has found app and cores idle; passes once that is known, after `CHECKS` such checks in a row. Nobody is told:
    what is better replaces what is rough. It waits while other programs compute or serve models or another window
    measures, and gives way when they begin to, and when somebody types. What they disturbed is measured again a minute
    later; a peak that an answer raised at once, then hourly."""

    CHECKS, CHECK_SECONDS = 6, 5.0

    def __init__(self, screen: Screen[Any], services: Services, session: ChatSession, reader: Reader) -> None:
        self._screen, self._services, self._session, self._reader = screen, services, session, reader
        self._busy = BusyCores()
        self._idle = 0
        self._input_at = 0.0
        self._stopped = False
        self._worker: Worker[None] | None = None
        self._known: _Subject | None = None
        self._retry_at = self._raised_at = 0.0  # from when on the disturbed, and a raised peak, are measured again
        self._probe: CostProbe | None = None
        services.on_input = self.interrupt
        session.background.append(self)
        screen.set_interval(self.CHECK_SECONDS, self._check)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing runs that measurements would disturb."""
        services = self._services
        busy = services.quantizing.job is not None or self._reader.busy or services.leaving
        hashing = any(download.state == "checking" for download in services.downloading.all())
        return self._session.is_idle and not busy and not hashing

    @property
    def running(self) -> bool:
        return self._worker is not None and not self._worker.is_finished

    def _check(self) -> None:
        if self.running or not self._is_wanted():
            self._idle = 0
            return
        model = self._session.conversation.model
        busy = self._busy.since_last((model.cpus if model is not None else ()) or own_cpus())
        is_free = busy is not None and busy < MAX_BUSY_CORES and self.is_idle and self._screen.is_current
        is_free = is_free and monotonic() - self._input_at >= self.CHECK_SECONDS
        self._idle = self._idle + 1 if is_free else 0
        if is_free:
            self._stopped = False
            self._worker = self._screen.run_worker(self._measure(), group="pass-probe", name="pass-probe")

    @property
    def done(self) -> bool:
        """Return whether these cores are measured, or cannot be, and no answer has raised their peak since."""
        known = self._session.conversation.meter.figures().roofline.peak.value
        raised = known is not None and known.at_least and monotonic() >= self._raised_at
        return self._known == self._subject() and not raised

    def _subject(self) -> _Subject:
        model = self._session.conversation.model  # a tuned one may compute on other cores
        return PlacementSpec.of(self._services.settings), model.cpus if model is not None else ()

    def _is_wanted(self) -> bool:
        model = self._session.conversation.model
        on_server = model is not None and bool(model.server)
        wanted = self._services.settings.hardware.probe and not on_server and not self.done
        return wanted and monotonic() >= self._retry_at

    def interrupt(self) -> None:
        """Stop at once without waiting; begin again when the app is idle."""
        self._idle, self._stopped, self._input_at = 0, True, monotonic()
        if self._probe is not None:
            self._probe.stop()

    async def stop(self) -> None:
        """Stop the measurement; it starts again when the app is idle."""
        self._idle, worker = 0, self._worker
        if worker is not None and not worker.is_finished:
            self.interrupt()
            if self._probe is None:
                worker.cancel()  # nothing waits for the threads that read, or fit
            await result_of(worker)

    async def _measure(self) -> None:
        subject = self._subject()
        try:
            with peak.one_at_a_time() as is_ours:
                if is_ours:
                    await self._measure_slice(subject)
        except Interrupted:
            pass
        except peak.ProbeFailed:  # little memory is free, for now
            self._retry_at = monotonic() + RAISED_SECONDS
        except (CpuchatError, OSError):
            if not self._stopped:
                self._end(subject)
        finally:
            self._probe = None
            self._busy.since_last(())  # this was no other program

    async def _measure_slice(self, subject: _Subject) -> None:
        """Measure a slice of a read bandwidth that is not known, else passes."""
        (spec, used), backend = subject, self._session.conversation.backend
        placement, probed = await run_in_daemon_thread(lambda: _placed(spec))
        sets = {(placement.cpus, placement.memory_policy.words)}
        if used and backend.engine is not None and {*used} <= {*own_cpus()}:
            sets.add((used, backend.engine.memory_policy))
        lacking = await run_in_daemon_thread(lambda: [one for one in sets if _lacks_peak(*one)])
        if lacking or not probed:
            if self._stopped:
                return
            if not await run_in_daemon_thread(lambda: _is_free(backend.pid)):
                self._retry_at = monotonic() + RETRY_SECONDS
                return
            if lacking and not await run_in_daemon_thread(lambda: self._measures_peak(*lacking[0])):
                self._retry_at = monotonic() + RETRY_SECONDS
            elif not lacking and self._idle >= self.CHECKS and await self._measures_passes(subject, placement):
                probed = True
            lacking = await run_in_daemon_thread(lambda: [one for one in lacking if _lacks_peak(*one)])
        if probed and not lacking:
            self._end(subject)
        await self._session.show_ceiling()

    async def _measures_passes(self, subject: _Subject, placement: Placement) -> bool:
        """Measure what is left of passes; False if other programs began to compute."""
        from cpuchat.bench.cost_probe import CostProbe, save_passes

        self._idle = 0
        self._probe = CostProbe(subject[0], beside=CostLog(placement.cpus, placement.memory_policy.words))
        found = await self._probe.run()
        self._probe = None
        if await run_in_daemon_thread(lambda: save_passes(found, placement)):
            return True
        self._retry_at = monotonic() + RETRY_SECONDS
        return False

    def _end(self, subject: _Subject) -> None:
        """Leave these cores alone; where an answer had raised their peak, for an hour even if another one does."""
        if self._known == subject:
            self._raised_at = monotonic() + RAISED_SECONDS
        self._known = subject

    def _measures_peak(self, cpus: tuple[int, ...], memory: str) -> bool:
        """Measure a slice of the read bandwidth of these cores; False beside other programs."""
        found = peak.measure(cpus, rounds=peak.SLICE, policy=memory, cancelled=lambda: self._stopped)
        peak.keep_slice(found, memory)
        return not found.disturbed


def _placed(spec: PlacementSpec) -> tuple[Placement, bool]:
    """Return where `spec` computes, and whether its passes are measured. Raises CpuchatError: no such cores."""
    placement = place(read_topology(), spec)
    return placement, CostLog(placement.cpus, placement.memory_policy.words).probe is not None


def _lacks_peak(cpus: tuple[int, ...], memory: str) -> bool:
    known = peak.known(cpus, memory)
    return known is None or known.at_least


def _is_free(pid: int | None) -> bool:
    """Return whether no server of this user is running, and memory is available without dropping pages of the file that
    the worker `pid` has loaded."""
    from cpuchat.models.prediction import spare_bytes

    if running_servers():
        return False
    worker = process_memory(pid) if pid is not None else None
    mapped = worker.shared if worker is not None else 0
    return available_bytes() - mapped >= spare_bytes(total_bytes()) + _MEMORY
