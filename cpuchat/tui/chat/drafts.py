"""What the user can do about drafting on the chat screen: switch it off and on, and see who proposed what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuchat.conversation import Conversation
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.settings import Settings

if TYPE_CHECKING:
    from cpuchat.tui.app import ChatApp
    from cpuchat.tui.markdown.transcript import Transcript


def switch(app: ChatApp, conversation: Conversation) -> str:
    """Switch drafting off or on for the next answers of this run; returns what to tell.

    When the settings have no drafters, switching on chooses them for good.
    """
    if conversation.settings.speculation.drafters == "off":
        conversation.drafting = True
        app.save_settings({"speculation": {"drafters": "auto"}})
        return "Drafting is on from the next answer. A draft model and measured depths come with the next load (^O)."
    conversation.drafting = not conversation.drafting
    if conversation.drafting:
        return "Drafting is on from the next answer."
    return "Drafting is off from the next answer until F9 switches it on again (for good: F2)."


def color(app: ChatApp, transcript: Transcript) -> str:
    """Mark text by its drafter, or no longer; returns what to tell, "" when the screen shows it."""
    on = not transcript.colors_drafts  # the setting is written in the background, and may lag behind two quick keys
    transcript.color_drafts(on)
    app.save_settings({"ui": {"color_drafts": on}})
    if not on or any(message.spans for message in transcript.messages):
        return ""
    return "Answers written from now on are marked by who proposed each part (Ctrl+T ends it)."


def load_again_for(before: Settings, after: Settings) -> bool:
    """Whether something changed that takes effect only when a model is loaded."""
    return (
        before.load_options() != after.load_options()
        or PlacementSpec.of(before) != PlacementSpec.of(after)
        or before.speculation.wanted_draft != after.speculation.wanted_draft
    )
