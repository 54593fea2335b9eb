"""Short words for tests of the hardware screen."""

from __future__ import annotations

from pathlib import Path

from cpuchat.hardware.topology import read_topology
from cpuchat.tui.hardware.picture import MachinePicture
from cpuchat.tui.hardware.screen import HardwareScreen
from cpuchat.tui.services import MachineWatch
from tests.support.chat_app import RunningApp
from tests.support.machines import WITH_DRAFT, FixtureReader, OnMachine, on


async def opened(app: RunningApp, reader: FixtureReader | None = None) -> HardwareScreen:
    """Open the screen on the machine of `reader` (None: this one), with everything read."""
    await app.ready()
    if reader is None:
        await app.press("f12")
    else:
        app.app.services.machine_watch = MachineWatch(lambda: reader.counters)
        await app.app.push_screen(HardwareScreen(app.app.services, reader))
    await app.until(lambda: isinstance(app.app.screen, HardwareScreen) and app.app.screen.facts is not None)
    screen = app.app.screen
    assert isinstance(screen, HardwareScreen)
    await app.until(lambda: screen.now.sample is not None or not screen.now.counting)
    await app.until(lambda: screen.now.passes)
    return screen


def said(screen: HardwareScreen) -> str:
    """Return the text at the lower edge of the placement pane."""
    return str(screen.query_one("#about").render())


def picture(screen: HardwareScreen) -> str:
    shown = screen.query_one(MachinePicture)
    return "\n".join(shown.render_line(y).text for y in range(shown.size.height))


def backend_on(root: Path, **more: object) -> OnMachine:
    return OnMachine(on(read_topology(root), WITH_DRAFT), **more)  # type: ignore[arg-type]
