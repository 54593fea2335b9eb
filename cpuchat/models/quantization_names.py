"""Quantizations as the names of files tell them, and which one is meant when none is named."""

from __future__ import annotations

import re

PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0")
"""The usual trade-off of size and quality first."""

_USUAL_BITS = 4
_PREFIXES = ("UD-", "QAT-")
_NAMED = re.compile(
    r"(?<![A-Z0-9])(?:(?P<prefix>UD|QAT)[-_.])?"
    r"(?P<type>[IT]?Q[1-9]_(?:[01]|K[LST]{0,2}|XXS|XS|S|M|NL)(?:_(?:XXS|XS|S|M|X*L|[48]|R[48]))*"
    r"|MXFP4(?:_MOE)?|NVFP4|BF16|FP?(?:16|32))(?![A-Z0-9])",
    re.IGNORECASE,
)


def quantization_of(path: str) -> str:
    """`Q4_K_M`, `UD-Q4_K_XL`, `QAT-Q4_0`, `BF16`: as the file's name says it, else its folder's; "" when neither does.

    Upper case. The `i1-` of weighted quantizations is left out: it stands before all of a repository or none.
    """
    for part in reversed(path.split("/")):
        found = _last(part)
        if found is not None:
            kind = found["type"].upper().replace("FP16", "F16").replace("FP32", "F32")
            return f"{found['prefix'].upper()}-{kind}" if found["prefix"] else kind
    return ""


def without_quantization(name: str) -> str:
    """`Qwen3-8B` of `Qwen3-8B-UD-Q4_K_XL`. `name` itself where it says nothing else, or nothing of it."""
    found = _last(name)
    if found is None:
        return name
    before, behind = name[: found.start()].rstrip("-._"), name[found.end() :]
    return f"{before}{behind}".strip("-._") or name


def without_prefix(quantization: str) -> str:
    """`Q4_K_M` of `UD-Q4_K_M`: what it is read as, made with more care."""
    for prefix in _PREFIXES:
        quantization = quantization.removeprefix(prefix)
    return quantization


def rank(quantization: str) -> tuple[int, int, bool]:
    """To sort by: the preferred ones first, then those whose bits are nearest to theirs; plain ones before `UD-`."""
    plain = without_prefix(quantization)
    bits = re.search(r"\d+", plain)
    place = PREFERRED.index(plain) if plain in PREFERRED else len(PREFERRED)
    return place, abs(int(bits[0]) - _USUAL_BITS) if bits else 99, plain != quantization


def _last(name: str) -> re.Match[str] | None:
    """The last that is named: names of models hold such words, too."""
    return max(_NAMED.finditer(name), key=re.Match.start, default=None)
