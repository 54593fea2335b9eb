"""The models of this machine: where they are, what they are, when they were used, and how to get rid of them."""

from cpuchat.models.library.deleting import Deletion, delete
from cpuchat.models.library.library import Library
from cpuchat.models.library.model import LocalModel
from cpuchat.models.library.places import DEMO_FILES, hub_cache

__all__ = ["DEMO_FILES", "Deletion", "Library", "LocalModel", "delete", "hub_cache"]
