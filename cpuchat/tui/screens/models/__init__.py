"""The models screen: what is here, what the catalog and the hub have, and what can be done with it."""

from cpuchat.tui.screens.models.reader import ModelsReader
from cpuchat.tui.screens.models.screen import ModelsScreen

__all__ = ["ModelsReader", "ModelsScreen"]
