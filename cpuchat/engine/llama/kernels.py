"""Chooses between cpuchat's kernels and llama.cpp's for the loads to come (`cpuchat.models.kernels`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from cpuchat.engine.llama import bindings
from cpuchat.models import kernels
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.protocol.options import Kernels


def select(wanted: Kernels) -> bool:
    """Choose the kernels of later loads in this process; return whether those of cpuchat take part."""
    if bindings.kernels_library is None:
        return False
    is_wanted = wanted == "auto"
    bindings.kernels_library.cpuchat_kernels_select((1 << len(kernels.TYPES)) - 1 if is_wanted else 0)
    return is_wanted


def refusal() -> str:
    """Return why a library that is installed is not used; "" where it is, and where there is none for this CPU."""
    if bindings.kernels_library is not None or not kernels.instructions_used(engine_cpu()):
        return ""
    return (
        "cpuchat's kernels were built for another engine or another cpuchat, so llama.cpp's compute. Reinstall "
        "llama-cpp-python and cpuchat together."
    )


def prepare(cpus: Sequence[int], n_threads: int, is_mapped: bool) -> None:
    """Tell them before a load which CPUs will compute, so that each of the threads lays out, and first touches, the
    weights that it will read; and whether the weights come from a mapped file, whose pages are then given back.

    Args:
        cpus: one for each thread, or more among which threads may move.
    """
    if bindings.kernels_library is not None:
        numbers = (ctypes.c_int * len(cpus))(*cpus)
        bindings.kernels_library.cpuchat_kernels_prepare(numbers, len(cpus), n_threads, is_mapped)
