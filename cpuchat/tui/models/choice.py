"""Chooses another model; if it cannot be loaded, the reason is shown where it was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cpuchat.daemon_thread import run_in_daemon_thread
from cpuchat.errors import CpuchatError
from cpuchat.text import clean_line
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dismissable import Dismissable


async def choose(screen: Dismissable[Any], services: Services, path: Path) -> None:
    """Return `path` from `screen`, or show there why it cannot be loaded in place of the loaded model."""

    def check() -> None:
        from cpuchat.models.machine import require_loadable

        require_loadable(path, services.settings, services.conversation.model)

    try:
        await run_in_daemon_thread(check)
    except (CpuchatError, OSError) as error:
        screen.notify(clean_line(str(error)), title="Not loaded", severity="error", timeout=10, markup=False)
    else:
        await screen.dismiss_when_on_top(path)
