"""Chooses between cpuchat's kernels and llama.cpp's for the loads to come (`cpuchat.models.kernels`)."""

from __future__ import annotations

from cpuchat.engine.llama import bindings
from cpuchat.models import kernels
from cpuchat.protocol.options import Kernels


def select(wanted: Kernels) -> bool:
    """Choose the kernels of later loads in this process; return whether those of cpuchat take part."""
    if bindings.kernels_library is None:
        return False
    is_wanted = wanted == "auto"
    bindings.kernels_library.cpuchat_kernels_select((1 << len(kernels.TYPES)) - 1 if is_wanted else 0)
    return is_wanted
