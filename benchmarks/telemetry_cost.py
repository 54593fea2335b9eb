"""What telemetry costs: CPU time of sampling counters, of working out the figures and of showing them, at 4 Hz.

    python benchmarks/telemetry_cost.py [--quick] [--rounds 5]

Counters: what opens on this machine, and each kind on a made-up server of two sockets with 16 to 24 memory channels.
There files are real files, and reading a counter is a real read of a real perf event, one that software counts; reading
a hardware counter of another socket costs some microseconds more. The panel is drawn as wide as in the app in a
terminal of 40 rows that nobody sees; what the same loop costs without it is subtracted.

CPU time of the process, user and system, by the time that passes at four samples a second, in percent of one core.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import Row, Target, arguments, machine, report, run_main, say

from cpuchat.hardware.counters.perf_events import Kernel, attributes, perf_event_open
from cpuchat.hardware.monitor import Monitor
from cpuchat.hardware.topology import read_topology
from cpuchat.protocol.messages import ModelLoaded, PrefillProgress, TextDelta
from cpuchat.protocol.model_info import ModelInfo, ModelWork, Weights
from cpuchat.telemetry.machine import Bandwidth, MachineSample, Power
from cpuchat.telemetry.meter import Meter
from tests.hardware.counters.simulated import energy, old_fabric, pmu, umc
from tests.hardware.trees import GIB, Machine, server

HZ = 4
LIMIT = 1.0
TURIN = Machine("AMD EPYC 9655 96-Core Processor", 26, 2, 12, 8, sockets=2, memory=768 * GIB)
MILAN = Machine("AMD EPYC 7763 64-Core Processor", 25, 1, 8, 8, sockets=2, memory=512 * GIB)
XEON = Machine(
    "Intel(R) Xeon(R) Platinum 8592+", 6, 207, 1, 64, sockets=2, vendor="GenuineIntel", flags="fpu", memory=512 * GIB
)
SAMPLE = MachineSample(Bandwidth(4e11, "umc", 3e11, 1e11), Power(500.0, 9.0, "rapl"))
TYPE_SOFTWARE, TASK_CLOCK = 1, 1


def _perf(attr: bytes, pid: int, cpu: int, flags: int) -> int:
    """A software event in place of the one that was asked for: reading it takes the same system call."""
    own = bytearray(attributes(TYPE_SOFTWARE, (TASK_CLOCK, 0, 0)))
    own[40] = 0x60  # without the kernel's own work, which needs fewer rights
    return perf_event_open(bytes(own), 0, -1, flags)


SIMULATED = Kernel(perf_event_open=_perf)


def _umc(root: Path) -> None:
    for channel in range(24):
        umc(root, channel, "0" if channel < 12 else "96")
    energy(root, "0,96")


def _fabric(root: Path) -> None:
    old_fabric(root, "0,64")
    energy(root, "0,64")


def _imc(root: Path) -> None:
    for number in range(8):
        names = {"cas_count_read": "event=0x05,umask=0xcf", "cas_count_write": "event=0x05,umask=0xf0"}
        pmu(root, f"uncore_imc_{number}", 30 + number, "0,64", {"event": "config:0-7", "umask": "config:8-15"}, names)
    energy(root, "0,64")


SOURCES: dict[str, tuple[Machine, Callable[[Path], None], str]] = {
    "AMD memory controllers, RAPL": (TURIN, _umc, "umc"),
    "AMD data fabric, RAPL": (MILAN, _fabric, "amd_df"),
    "Intel memory controllers, RAPL": (XEON, _imc, "imc"),
}


def percent(call: Callable[[float], object], samples: int) -> float:
    """CPU of `samples` calls, four of them to the second; each gets the time that it would be."""
    began = time.process_time()
    for number in range(samples):
        call(100 + number / HZ)
    return 100 * (time.process_time() - began) / (samples / HZ)


def sampling(monitor: Monitor, samples: int, rounds: int) -> list[float]:
    found: list[float] = []
    for number in range(rounds):
        start = 1 + number * samples  # the clock goes on from round to round
        found.append(percent(lambda now, start=start: monitor.sample(now + start / HZ), samples))
    return found


def simulated(name: str, samples: int, rounds: int) -> list[float]:
    kind, files, wanted = SOURCES[name]
    with tempfile.TemporaryDirectory() as folder:
        root = server(Path(folder), kind)
        files(root)
        monitor = Monitor(read_topology(root), root, kernel=SIMULATED)
        monitor.sample(1.0)
        monitor.sample(50.0)
        if monitor.sources[:1] != (wanted,) or len(monitor.sources) < 2:
            raise SystemExit(f"{name}: {monitor.sources or monitor.sample(90.0)} opened instead")
        try:
            return sampling(monitor, samples, rounds)
        finally:
            monitor.close()


def answering() -> Meter:
    """A meter in the middle of an answer."""
    meter = Meter()
    work = ModelWork(n_layer=0, dense=(Weights("Q8_0", 1.6e9, 1.5e9),), row=2000)
    model = ModelInfo(
        path="", name="m", architecture="", quantization="Q8_0", n_params=0, size=1_600_000_000, n_ctx=32768,
        n_ctx_train=0, n_vocab=0, n_layer=0, n_threads=64, peak_read=5e11, work=work,
    )  # fmt: skip
    meter.observe(ModelLoaded(model=model), 0)
    meter.request_started(0)
    meter.observe(PrefillProgress(request_id=1, processed=64, total=64, cache_n=0), 0.1)
    return meter


def tokens(meter: Meter, number: int) -> None:
    """A quarter of a second of an answer at 60 tok/s."""
    for token in range(15 * number, 15 * number + 15):
        meter.observe(TextDelta(request_id=1, text="", predicted_n=token + 1, at_ms=1000 * token / 60), token / 60)


def figures(samples: int, rounds: int) -> list[float]:
    """Taking in counters and tokens and working out the figures."""
    found: list[float] = []
    for _ in range(rounds):
        meter = answering()
        number = iter(range(samples))

        def step(now: float, meter: Meter = meter, number: Iterator[int] = number) -> None:
            tokens(meter, next(number))
            meter.machine(SAMPLE)
            meter.figures(now)

        found.append(percent(step, samples))
    return found


async def panel(samples: int, rounds: int) -> list[float]:
    """Showing the figures: CPU of a loop that shows them, less that of the same loop without."""
    from textual.app import App, ComposeResult

    from cpuchat.telemetry.machine import process_memory
    from cpuchat.tui.chat.telemetry import TelemetryPanel
    from cpuchat.tui.themes import OWN_VARIABLES

    class Host(App[None]):
        CSS = "TelemetryPanel { width: 32; height: 100%; padding: 0 1; border: round $foreground 40%; }"

        def get_theme_variable_defaults(self) -> dict[str, str]:
            return OWN_VARIABLES

        def compose(self) -> ComposeResult:
            yield TelemetryPanel()

    found: list[float] = []
    app = Host()
    async with app.run_test(size=(120, 40)) as pilot:
        shown = app.query_one(TelemetryPanel)
        for _ in range(rounds):
            used: list[float] = []
            for show in (False, True):
                meter = answering()
                await pilot.pause()
                began = time.process_time()
                for number in range(samples):
                    tokens(meter, number)
                    meter.machine(SAMPLE)
                    now = meter.figures(number / HZ)
                    if show:
                        shown.show(now, process_memory(os.getpid()))
                    await asyncio.sleep(0.04)  # time to paint
                used.append(time.process_time() - began)
            found.append(100 * (used[1] - used[0]) / (samples / HZ))
    return found


def main() -> None:
    options = arguments(__doc__)
    rounds = options.rounds or (1 if options.quick else 5)
    samples = 40 if options.quick else 400
    where = machine()
    target = Target(LIMIT, at_least=False)
    rows: list[Row] = []

    def add(what: str, values: list[float]) -> list[float]:
        say(f"{what}: {min(values):.3f} to {max(values):.3f} %")
        rows.append(Row(what, "% of a core", values, target=target))
        return values

    here = Monitor(read_topology())
    here.sample(1.0)
    opened = ", ".join(here.sources) or "nothing opens"
    add(f"counters: this machine ({opened})", sampling(here, samples, rounds))
    here.close()
    counted = [add(f"counters: {name}", simulated(name, samples, rounds)) for name in SOURCES]
    worst = [max(values) for values in zip(*counted, strict=True)]
    worked_out = add("working out the figures", figures(samples, rounds))
    drawn = add("showing the figures", asyncio.run(panel(min(samples, 100), rounds)))
    add(
        "all of it, with the most expensive counters",
        [sum(all_of) for all_of in zip(worst, worked_out, drawn, strict=True)],
    )
    report("telemetry_cost", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
