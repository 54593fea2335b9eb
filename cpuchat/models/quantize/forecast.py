"""Forecasts the result of quantizing a model: llama.cpp computes it in a dry run that reads no weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from cpuchat.errors import QuantizeFailed, UsageError
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.gguf.parse import TensorInfo
from cpuchat.models.gguf.types import ALIGNMENT, BY_NAME
from cpuchat.models.quantize.messages import ForecastRequest, ForecastResult
from cpuchat.models.quantize.process import QuantizeProcess
from cpuchat.models.quantize.types import PRECISE, QuantType
from cpuchat.models.traffic import traffic_of
from cpuchat.telemetry.traffic import pass_bytes


class Forecast(msgspec.Struct, frozen=True):
    """The file that `type` would give. `header` is its header, for predicting fit and speed.

    `file_size` in bytes, exact to a few hundred. `needs_imatrix`: some tensors need an importance matrix. `lossy`:
    types of tensors that are already quantized below Q8_0 and would be quantized again.
    """

    type: QuantType
    header: GGUFHeader
    needs_imatrix: bool
    lossy: tuple[str, ...] = ()

    @property
    def file_size(self) -> int:
        return self.header.file_size

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.header.size / max(self.header.n_params, 1)


def speed_up(source: GGUFHeader, made: GGUFHeader) -> float:
    """Return how many times as fast `made` decodes as `source` where decoding is memory-bound."""
    before, after = (pass_bytes(traffic_of(header), 1, 0) for header in (source, made))
    return before / max(after, 1.0)


async def source_header(source: Path) -> GGUFHeader:
    """Read the header of a model to quantize.

    Raises:
        ModelNotFound, ModelDamaged: as `read_model`.
        UsageError: it is not a language model.
    """
    header = await asyncio.to_thread(read_model, source)
    if header.other:
        raise UsageError(
            f"{source.name} is {header.other}, not a language model.", "Choose the GGUF file of a language model."
        )
    return header


async def forecast_type(process: QuantizeProcess, source: GGUFHeader, kind: QuantType) -> Forecast:
    """Forecast the model of `source` (from `source_header`) as `kind`.

    Raises:
        QuantizeFailed: llama.cpp does not support the architecture, or this type for it.
    """
    await process.send(ForecastRequest(source=str(source.path), number=kind.number))
    answer = await process.receive()
    if not isinstance(answer, ForecastResult) or answer.types.keys() != {tensor.name for tensor in source.tensors}:
        raise QuantizeFailed(f"llama.cpp reads other tensors from {source.path.name} than its header lists.")
    changed = {t.type for t in source.tensors if answer.types[t.name] != t.type}
    return Forecast(
        type=kind,
        header=_header(source, kind, answer.types),
        needs_imatrix=answer.needs_imatrix,
        lossy=tuple(sorted(changed - PRECISE)),
    )


def _header(source: GGUFHeader, kind: QuantType, types: dict[str, str]) -> GGUFHeader:
    """Return the header of one file with all tensors in their new types."""
    tensors: list[TensorInfo] = []
    at = 0
    for tensor in source.tensors:
        new = BY_NAME[types[tensor.name]]
        nbytes = tensor.n_elements // new.block * new.nbytes
        tensors.append(msgspec.structs.replace(tensor, type=new.name, offset=at, nbytes=nbytes))
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    metadata = {key: value for key, value in source.metadata.items() if not key.startswith("split.")}
    return msgspec.structs.replace(
        source,
        metadata=metadata | {"general.file_type": kind.number},
        tensors=tensors,
        file_size=source.data_offset + at,
        alignment=ALIGNMENT,
    )
