"""What the installed engine cannot run, and what it runs on this CPU without vector instructions.

Everything is told from a header, before a download or a load, by processes that never load llama.cpp. The architectures
are those whose names the engine's library contains (LLM_ARCH_NAMES in llama-arch.cpp); the types without a vectorized
dot product are those of arch-fallback.h and of the last branches in arch/x86/quants.c (ggml 0.25.3).
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection
from typing import Final

from cpuchat.base.errors import ModelUnsupported
from cpuchat.base.text import clean_line
from cpuchat.hardware.topology import Instructions
from cpuchat.models.file_names import engine_knows
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import BY_NAME
from cpuchat.protocol.model_info import ModelWork

_ROTATED: Final = "prism.hadamard."
"""Keys of models whose activations have to be rotated before each product (Bonsai 2). llama.cpp ignores the keys."""
_X86 = ("x86_64", "amd64", "i686", "i386")
_BINARY = frozenset({"NVFP4", "Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "IQ1_M"})
_SMALL_IQ = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"})
_SCALAR: Final = {
    "ppc64le": _BINARY,
    "loongarch64": _BINARY | {"MXFP4"},
    "riscv64": frozenset({"NVFP4", "Q2_0"}),
    "s390x": frozenset({"NVFP4", "Q2_0", "TQ1_0", "TQ2_0", "Q2_K"}) | _SMALL_IQ,
}
"""Types by machine, as `platform.machine` names it; 64-bit ARM has vector instructions for all of them."""
_SHARE = 0.1  # of the weights that a pass reads, from which their type decides


def why_unsupported(header: GGUFHeader) -> str:
    """Return why the engine cannot run the model of `header`, as a clause; "" when nothing is known against it."""
    if header.other:
        return ""
    return why_garbage(header) or why_unknown(header.architecture)


def why_garbage(header: GGUFHeader) -> str:
    """Return why the engine would load the model and print garbage, as a clause; "" for all but a few."""
    if any(key.startswith(_ROTATED) for key in header.metadata):
        return "it would print garbage: its weights are rotated (Bonsai 2), which this llama.cpp does not undo"
    return ""


def why_unknown(architecture: str) -> str:
    """Return why the engine cannot run this architecture, as a clause; "" when it can."""
    if engine_knows(architecture):
        return ""
    return f"it needs a newer engine: this llama.cpp does not know the architecture {clean_line(architecture)[:40]!r}"


def check_supported(header: GGUFHeader) -> None:
    """Refuse a model that the engine cannot run.

    Raises:
        ModelUnsupported: the message says why.
    """
    if why := why_unsupported(header):
        raise ModelUnsupported(
            f"{header.path.name} cannot run here: {why}.",
            "Choose another model, or run this one on a server that supports it (--server URL).",
        )


def scalar_types(cpu: Instructions, machine: str = "") -> frozenset[str]:
    """Return the tensor types that `cpu` computes without vector instructions. `machine` as `platform.machine` names
    it; "": this one."""
    machine = (machine or platform.machine()).lower()
    if machine not in _X86:
        return _SCALAR.get(machine, frozenset())
    if "AVX" not in cpu.features:
        quantized = {name for name, kind in BY_NAME.items() if kind.block > 1}
        return frozenset(quantized - {"Q1_0", "Q4_0", "Q8_1", "Q8_K"})
    return frozenset({"Q2_0"} if "AVX2" in cpu.features else {"Q2_0", "TQ1_0", "TQ2_0"})


def scalar_type_of(work: ModelWork, scalar: Collection[str]) -> str:
    """Return which of the `scalar` types a tenth or more of a model's weights have; "" for none."""
    nbytes = Counter[str]()
    for one in (*work.dense, *work.head, *work.experts):
        nbytes[one.type] += round(one.nbytes)
    found = [(count, kind) for kind, count in nbytes.items() if kind in scalar and count >= _SHARE * nbytes.total()]
    return max(found)[1] if found else ""


def why_slow(scalar: str) -> str:
    """Return why no speed is predicted for weights of a scalar type, as a clause."""
    return f"{scalar} has no SIMD kernel on this CPU, which makes it several times slower"
