"""Choosing another model: what can't be loaded is told where it was chosen, and the loaded one stays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from cpuchat.errors import CpuchatError
from cpuchat.text import clean_line
from cpuchat.tui.threads import apart
from cpuchat.tui.widgets.dismissable import Dismissable

if TYPE_CHECKING:
    from cpuchat.tui.app import ChatApp


async def choose(screen: Dismissable[Path | None], path: Path) -> None:
    """Let `screen` return `path`, or show there why it can't be loaded in the place of the loaded model."""
    conversation = cast("ChatApp", screen.app).conversation

    def check() -> None:
        from cpuchat.models.machine import require_loadable

        require_loadable(path, conversation.settings, conversation.model)

    try:
        await apart(check)
    except (CpuchatError, OSError) as error:
        screen.notify(clean_line(str(error)), title="Not loaded", severity="error", timeout=10, markup=False)
    else:
        await screen.dismiss_when_on_top(path)
