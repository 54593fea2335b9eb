"""Choosing another model: what can't be loaded is told where it was chosen, and the loaded one stays."""

from __future__ import annotations

from pathlib import Path

from cpuchat.errors import CpuchatError
from cpuchat.text import clean_line
from cpuchat.tui.services import Services
from cpuchat.tui.threads import run_in_daemon_thread
from cpuchat.tui.widgets.dismissable import Dismissable


async def choose(screen: Dismissable[Path | None], services: Services, path: Path) -> None:
    """Let `screen` return `path`, or show there why it can't be loaded in the place of the loaded model."""

    def check() -> None:
        from cpuchat.models.machine import require_loadable

        require_loadable(path, services.settings, services.conversation.model)

    try:
        await run_in_daemon_thread(check)
    except (CpuchatError, OSError) as error:
        screen.notify(clean_line(str(error)), title="Not loaded", severity="error", timeout=10, markup=False)
    else:
        await screen.dismiss_when_on_top(path)
