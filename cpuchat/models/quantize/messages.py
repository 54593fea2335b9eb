"""Messages between the app and the quantizing process (`engine.quantize`): lines of JSON.

The process ends with its input, so that it never outlives its parent.
"""

from __future__ import annotations

import msgspec


class ForecastRequest(msgspec.Struct, frozen=True, kw_only=True, tag="forecast"):
    """Request: forecast quantizing `source` to the file type `number`, without reading its weights."""

    source: str
    number: int


class QuantizeRequest(msgspec.Struct, frozen=True, kw_only=True, tag="quantize"):
    """Request: write `out`. `imatrix` "": none; `requantize` allows tensors that are already quantized."""

    source: str
    out: str
    number: int
    threads: int
    imatrix: str = ""
    requantize: bool = False


class ForecastResult(msgspec.Struct, frozen=True, kw_only=True, tag="forecast_result"):
    """Answer: `types` of the tensors by name. `needs_imatrix`: some of these need an importance matrix."""

    types: dict[str, str]
    needs_imatrix: bool


class TensorStarted(msgspec.Struct, frozen=True, kw_only=True, tag="tensor_started"):
    """Progress: the tensor `name` is being written."""

    name: str


class QuantizeFinished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Answer: the file is written; the parent checks it."""


Request = ForecastRequest | QuantizeRequest
Answer = ForecastResult | TensorStarted | QuantizeFinished
