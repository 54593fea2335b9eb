"""Puts cpuchat's kernels in front of llama.cpp's for the loads that want them (`cpuchat.models.kernels`)."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from cpuchat.engine.llama import bindings
from cpuchat.models import kernels
from cpuchat.protocol.options import Kernels


def select(wanted: Kernels) -> str:
    """Choose the kernels of later loads in this process; return the instruction set that they use, "" for llama.cpp's.

    Also "" where the library is missing, was built for another engine, or this CPU lacks the instructions.
    """
    library = _library() if wanted == "auto" else _library.cache_info().currsize and _library()
    if not library:
        return ""
    library.cpuchat_kernels_select((1 << len(kernels.TYPES)) - 1 if wanted == "auto" else 0)
    return _registered(library) if wanted == "auto" else ""


@functools.cache
def _library() -> Any:
    """Open the library against the CPU backend in use. Its symbols must be global before that: a backend that is a
    module of its own was opened by llama.cpp without."""
    file = kernels.library()
    if file is None:
        return None
    try:
        bindings.export_backend()
        library = ctypes.CDLL(os.fspath(file))
        library.cpuchat_kernels_version.restype = ctypes.c_char_p
        library.cpuchat_kernels_register.restype = ctypes.c_char_p
    except (OSError, AttributeError):
        return None
    return library if library.cpuchat_kernels_version() == bindings.ggml_version() else None


@functools.cache
def _registered(library: Any) -> str:
    return (library.cpuchat_kernels_register(None) or b"").decode("ascii")
