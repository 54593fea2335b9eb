"""Drafting controls of the chat screen: on or off, and coloring drafted tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuchat.config.servers import ServerModel
from cpuchat.config.settings import Settings
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.tui.services import Services

if TYPE_CHECKING:
    from cpuchat.tui.markdown.transcript import Transcript


def switch(services: Services) -> str:
    """Switch drafting of the next answers of this run off, or on as the settings say; returns the message to show.

    If the settings have no drafters, the first press sets them to auto.
    """
    conversation = services.conversation
    if isinstance(services.loaded, ServerModel):
        return "The server drafts as it was started; its options switch it on or off."
    if conversation.settings.speculation.drafters == "off":
        conversation.drafts = True
        services.save_settings({"speculation": {"drafters": "auto"}})
        return "Drafting on from the next answer. The draft model and calibration come with the next load (Ctrl+O)."
    conversation.drafts = not conversation.drafts
    if not conversation.drafts:
        return "Drafting off from the next answer. F9: on; F2 to disable it permanently."
    if conversation.in_effect.speculation.drafters == "off":
        return "Drafting off, because tuning found it slower with this model (`cpuchat tune --undo` reverts it)."
    return "Drafting on from the next answer."


def color(services: Services, transcript: Transcript) -> str:
    """Toggle coloring of drafted tokens; returns the message to show, "" when the screen shows it."""
    on = not transcript.colors_drafts  # the setting is written in the background, and may lag behind two quick keys
    transcript.color_drafts(on)
    services.save_settings({"ui": {"color_drafts": on}})
    if not on or any(message.spans for message in transcript.messages):
        return ""
    return "New answers of models on this machine are colored by drafter (Ctrl+T turns it off)."


def needs_reload(before: Settings, after: Settings) -> bool:
    """Return whether something changed that takes effect only on a load."""
    return (
        before.load_options() != after.load_options()
        or PlacementSpec.of(before) != PlacementSpec.of(after)
        or before.speculation.wanted_draft != after.speculation.wanted_draft
    )
