"""Drafting controls of the chat screen: on, off, and coloring drafted tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.servers import ServerModel
from cpuchat.settings import Settings
from cpuchat.tui.services import Services

if TYPE_CHECKING:
    from cpuchat.tui.markdown.transcript import Transcript


def switch(services: Services) -> str:
    """Toggle drafting for the next answers of this run; returns the message to show.

    If the settings have no drafters, turning it on sets them to auto.
    """
    conversation = services.conversation
    if isinstance(services.loaded, ServerModel):
        return "The server drafts as it was started; its options switch it on or off."
    if conversation.settings.speculation.drafters == "off":
        conversation.drafting = True
        services.save_settings({"speculation": {"drafters": "auto"}})
        return "Drafting on from the next answer. The draft model and calibration come with the next load (Ctrl+O)."
    if conversation.in_effect.speculation.drafters == "off":
        return "Drafting stays off: tuning found it slower with this model (F2, then F8, undoes the tuning)."
    conversation.drafting = not conversation.drafting
    loaded = conversation.model
    how = f", which restarts {loaded.engine}" if loaded is not None and loaded.engine else ""
    if conversation.drafting:
        return f"Drafting on from the next answer{how}."
    return f"Drafting off from the next answer{how}. F9 turns it on again; F2 turns it off for good."


def color(services: Services, transcript: Transcript) -> str:
    """Toggle coloring of drafted tokens; returns the message to show, "" when the screen shows it."""
    on = not transcript.colors_drafts  # the setting is written in the background, and may lag behind two quick keys
    transcript.color_drafts(on)
    services.save_settings({"ui": {"color_drafts": on}})
    if not on or any(message.spans for message in transcript.messages):
        return ""
    if isinstance(services.loaded, ServerModel):
        return "The server does not report which tokens were drafted: only answers of this machine are colored."
    return "New answers are colored by drafter (Ctrl+T turns it off)."


def needs_reload(before: Settings, after: Settings) -> bool:
    """Return whether something changed that takes effect only on a load."""
    return (
        before.load_options() != after.load_options()
        or PlacementSpec.of(before) != PlacementSpec.of(after)
        or before.speculation.wanted_draft != after.speculation.wanted_draft
    )
