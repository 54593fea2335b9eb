"""Choosing the draft model for good: at once for one that is here, after its download for the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuchat.errors import CpuchatError
from cpuchat.models.drafts.choice import choose_draft
from cpuchat.present import drafts
from cpuchat.text import clean_line
from cpuchat.tui.settings.form import with_changes
from cpuchat.tui.threads import apart

if TYPE_CHECKING:
    from cpuchat.models.downloads.state import Download
    from cpuchat.tui.app import ChatApp


def use(app: ChatApp, wanted: str) -> None:
    """Take `wanted` (the path of a file, drafts.AUTO or NONE) as draft model from the next load on.

    Drafting with a model is switched on if the settings have it off.
    """
    conversation = app.conversation
    changes: dict[str, dict[str, Any]] = {
        "speculation": {"draft_model": "" if wanted == drafts.AUTO else wanted}
    }  # fmt: skip
    if wanted != drafts.NONE and conversation.settings.speculation.drafters not in ("auto", "draft"):
        changes["speculation"]["drafters"] = "auto"
    conversation.settings = with_changes(conversation.settings, changes)
    app.save_settings(changes)


async def use_when_here(app: ChatApp, download: Download, target: Path) -> None:
    """Wait for `download`, through pauses and new tries, then use it, and load `target` again if that is still the
    model and nothing is written."""
    done = await app.downloading.arrival(download.id)
    if done is None:
        return  # the user has taken it off the list
    name, chat = clean_line(done.model.name), app.chat_screen
    try:
        await apart(lambda: choose_draft(target, done.path, app.library))
    except (CpuchatError, OSError) as error:
        app.notify(clean_line(f"{name} is not used. {error}"), title="Draft model", severity="error", timeout=10,
                   markup=False)  # fmt: skip
        return
    use(app, done.path)
    model = app.conversation.model
    if model is not None and Path(model.path) == target and not chat.busy:
        app.notify(f"{name} drafts from now on.", markup=False)
        chat.load_model(target)
    else:
        app.notify(f"{name} drafts from the next load on.", markup=False)
