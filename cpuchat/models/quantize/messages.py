"""Messages between the app and the quantizing process (`engine.quantize`): lines of JSON.

The process ends with its input, so that it never outlives its parent.
"""

from __future__ import annotations

import msgspec


class Foresee(msgspec.Struct, frozen=True, kw_only=True, tag="foresee"):
    """Forecast quantizing `source` to the file type `number`, without reading its weights."""

    source: str
    number: int


class Make(msgspec.Struct, frozen=True, kw_only=True, tag="make"):
    """Write `out`. `imatrix` "": none; `requantize` allows tensors that are already quantized."""

    source: str
    out: str
    number: int
    threads: int
    imatrix: str = ""
    requantize: bool = False


class Foreseen(msgspec.Struct, frozen=True, kw_only=True, tag="foreseen"):
    """`types` of the tensors by name. `needs_imatrix`: some of these need an importance matrix."""

    types: dict[str, str]
    needs_imatrix: bool


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """The tensor `name` is being written."""

    name: str


class Made(msgspec.Struct, frozen=True, kw_only=True, tag="made"):
    """The file is written; it is the parent's to check."""


Request = Foresee | Make
Answer = Foreseen | Begun | Made
