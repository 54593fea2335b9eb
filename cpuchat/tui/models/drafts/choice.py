"""Sets the draft model: at once for one on this machine, else after its download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import App

from cpuchat.daemon_thread import run_in_daemon_thread
from cpuchat.errors import CpuchatError
from cpuchat.models.drafts.choice import choose_draft
from cpuchat.models.drafts.chosen import ChosenDrafts
from cpuchat.present import drafts
from cpuchat.settings import Changes, with_changes
from cpuchat.text import clean_line
from cpuchat.tui.services import Services

if TYPE_CHECKING:
    from cpuchat.models.downloads.state import Download


def use(services: Services, target: Path, wanted: str, depth: int | None = None) -> None:
    """Make `wanted` (the path of a file, drafts.AUTO or NONE) the draft model of `target` from its next load on.

    One that the settings have for all models no longer counts. Drafting with a model is turned on if the settings have
    it off. `depth` None leaves the draft depth.
    """
    conversation = services.conversation
    ChosenDrafts().put(target, wanted)
    changes: Changes = {"speculation": {}}
    if conversation.settings.speculation.draft_model:
        changes["speculation"]["draft_model"] = ""
    if wanted != drafts.NONE and conversation.settings.speculation.drafters not in ("auto", "draft"):
        changes["speculation"]["drafters"] = "auto"
    if depth is not None:
        changes["speculation"]["depth"] = depth
    if changes["speculation"]:
        conversation.settings = with_changes(conversation.settings, changes)
        services.save_settings(changes)


async def use_when_here(app: App[Any], services: Services, download: Download, target: Path) -> None:
    """Wait for `download`, through pauses and retries, then use it, and reload `target` if that is still the model and
    nothing runs."""
    done = await services.downloading.arrival(download.id)
    if done is None:
        return  # the user has taken it off the list
    name, chat = clean_line(done.model.name), services.chat
    try:
        await run_in_daemon_thread(lambda: choose_draft(target, done.path, services.library, heads=True))
    except (CpuchatError, OSError) as error:
        text = clean_line(f"{name} cannot be the draft model. {error}")
        app.notify(text, title="Draft model", severity="error", timeout=10, markup=False)
        return
    use(services, target, done.path)
    model = services.conversation.model
    if model is not None and Path(model.path) == target and not chat.busy:
        app.notify(f"{name} is now the draft model.", markup=False)
        chat.load_model(target)
    else:
        app.notify(f"{name} will be the draft model of {clean_line(target.stem)} from its next load.", markup=False)
