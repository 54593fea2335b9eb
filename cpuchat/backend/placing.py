"""Decides where the engines of this machine compute."""

from __future__ import annotations

from cpuchat.hardware.numa.mempolicy import current
from cpuchat.hardware.placement.placement import Placement, PlacementSpec, place
from cpuchat.hardware.topology import read_topology


def place_here(spec: PlacementSpec, *, with_draft: bool) -> Placement:
    """Return the cores and the memory policy for `spec`. Raises UsageError for what this machine does not allow."""
    inherited = current()
    return place(
        read_topology(), spec, with_draft=with_draft, inherits_policy=inherited is None or bool(inherited.places)
    )
