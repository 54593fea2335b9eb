"""The quantization types that llama.cpp can write.

Source: llama-cpp-python 0.3.36, src/llama-quant.cpp (llama_ftype_get_default_type, tensor_requires_imatrix). Bits per
weight are those of Llama 3.1 8B where tools/quantize/README.md has them, else those of the type itself.
"""

from __future__ import annotations

import difflib

import msgspec

from cpuchat.errors import UsageError
from cpuchat.models.gguf.types import FILE_TYPE_BY_NAME
from cpuchat.models.library.model import LocalModel


class QuantType(msgspec.Struct, frozen=True):
    """`name` as in file names, `tensor` the type of most of its tensors.

    `bits` per weight of a typical model, including scales and larger tensors. `needs_imatrix`: llama.cpp refuses it
    without an importance matrix, because the result would be useless.
    """

    name: str
    tensor: str
    bits: float
    about: str
    needs_imatrix: bool = False

    @property
    def number(self) -> int:
        """`enum llama_ftype`."""
        return FILE_TYPE_BY_NAME[self.name]


PRECISE = frozenset({"F32", "F16", "BF16", "Q8_0"})
"""Types from which quantizing loses nothing more, or nearly nothing."""
TYPES: tuple[QuantType, ...] = (
    QuantType("F32", "F32", 32.0, "lossless; four times the size of Q8_0"),
    QuantType("F16", "F16", 16.0, "as published"),
    QuantType("BF16", "BF16", 16.0, "as published"),
    QuantType("Q8_0", "Q8_0", 8.5, "nearly lossless"),
    QuantType("Q6_K", "Q6_K", 6.56, "very low loss"),
    QuantType("Q5_K_M", "Q5_K", 5.7, "low loss"),
    QuantType("Q5_K_S", "Q5_K", 5.57, "low loss"),
    QuantType("Q5_1", "Q5_1", 6.0, "older; Q5_K_M is better"),
    QuantType("Q5_0", "Q5_0", 5.5, "older; Q5_K_S is better"),
    QuantType("Q4_K_M", "Q4_K", 4.89, "the usual trade-off"),
    QuantType("Q4_K_S", "Q4_K", 4.67, "a little smaller than Q4_K_M"),
    QuantType("Q4_1", "Q4_1", 5.0, "older; Q4_K_M is better"),
    QuantType("Q4_0", "Q4_0", 4.5, "simple; repacked on most CPUs"),
    QuantType("IQ4_NL", "IQ4_NL", 4.68, "like Q4_K_S, better with an importance matrix"),
    QuantType("IQ4_XS", "IQ4_XS", 4.46, "small for its quality, slower to unpack"),
    QuantType("MXFP4", "MXFP4", 4.25, "for mixtures of experts such as gpt-oss"),
    QuantType("Q3_K_L", "Q3_K", 4.3, "noticeable loss"),
    QuantType("Q3_K_M", "Q3_K", 4.0, "noticeable loss"),
    QuantType("Q3_K_S", "Q3_K", 3.64, "substantial loss"),
    QuantType("IQ3_M", "IQ3_S", 3.76, "noticeable loss, slower to unpack"),
    QuantType("IQ3_S", "IQ3_S", 3.66, "noticeable loss, slower to unpack"),
    QuantType("IQ3_XS", "IQ3_S", 3.5, "substantial loss, slower to unpack", needs_imatrix=True),
    QuantType("IQ3_XXS", "IQ3_XXS", 3.25, "substantial loss, slower to unpack", needs_imatrix=True),
    QuantType("Q2_K", "Q2_K", 3.16, "high loss"),
    QuantType("Q2_K_S", "Q2_K", 2.97, "high loss", needs_imatrix=True),
    QuantType("IQ2_M", "IQ2_S", 2.93, "high loss, slower to unpack", needs_imatrix=True),
    QuantType("IQ2_S", "IQ2_XS", 2.74, "high loss, slower to unpack", needs_imatrix=True),
    QuantType("IQ2_XS", "IQ2_XS", 2.59, "high loss, slower to unpack", needs_imatrix=True),
    QuantType("IQ2_XXS", "IQ2_XXS", 2.38, "high loss, slower to unpack", needs_imatrix=True),
    QuantType("Q2_0", "Q2_0", 2.25, "only for models trained for it"),
    QuantType("TQ2_0", "TQ2_0", 2.06, "only for models trained with ternary weights"),
    QuantType("TQ1_0", "TQ1_0", 1.69, "only for models trained with ternary weights"),
    QuantType("IQ1_M", "IQ1_M", 2.15, "hardly usable", needs_imatrix=True),
    QuantType("IQ1_S", "IQ1_S", 2.0, "hardly usable", needs_imatrix=True),
    QuantType("Q1_0", "Q1_0", 1.125, "only for models trained for it"),
)
_WORTHWHILE = 0.97  # of the size; a model that becomes hardly smaller only loses quality
_BY_NAME = {kind.name: kind for kind in TYPES}
# Aliases of tools/quantize/quantize.cpp.
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4_MOE": "MXFP4"}
# Former or foreign formats, and their standard equivalents.
_REPACKED = {
    "Q4_0_4_4": "Q4_0",
    "Q4_0_4_8": "Q4_0",
    "Q4_0_8_8": "Q4_0",
    "Q4_K_4": "Q4_K_M",
    "Q8R16": "Q8_0",
}


def smaller_types(model: LocalModel) -> tuple[QuantType, ...]:
    """Return the types that make a model smaller, by their usual bits per weight."""
    most = _WORTHWHILE * model.size
    return tuple(k for k in TYPES if k.bits * model.n_params / 8 < most and k.name != model.quantization.upper())


def quant_type(text: str) -> QuantType:
    """Return the type that `text` names, in any case.

    Raises:
        UsageError: there is none; the hint names similar ones, or the successor of a retired one.
    """
    name = text.strip().upper()
    name = _ALIASES.get(name, name)
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name in _REPACKED:
        raise UsageError(
            f"{name} is a repacked format of {_REPACKED[name]}, which llama.cpp does not load.",
            f"Use {_REPACKED[name]}: it is repacked for the CPU at load.",
        )
    close = difflib.get_close_matches(name, [*_BY_NAME, *_ALIASES], n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else "`cpuchat models quantize --list` lists them."
    raise UsageError(f"There is no quantization {text.strip()[:40]!r}.", hint)
