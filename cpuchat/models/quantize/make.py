"""Quantizes a model: checked before the start, in its own process; the file appears only when complete."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cpuchat.base.errors import CpuchatError, QuantizeFailed, UsageError
from cpuchat.base.files import check_place
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import read_topology
from cpuchat.models.gguf.header import GGUFHeader, read_header
from cpuchat.models.ollama import file_name
from cpuchat.models.quantize.types import (
    AUTO_TYPES,
    Forecast,
    MatrixTypes,
    QuantizeFinished,
    QuantizeProcess,
    QuantType,
    TensorStarted,
    check_out,
    check_space,
    forecast_type,
    part_of,
    quantize_request,
    source_header,
)

_TICK_SECONDS = 0.25


class QuantizeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Quantizing `source` to `out`. `matrices`: whose types are chosen. `threads` 0: one per core.

    `requantize` allows a source that is quantized below Q8_0, `force` overwriting `out`."""

    source: Path
    out: Path
    type: QuantType
    matrices: MatrixTypes = AUTO_TYPES
    threads: int = 0
    requantize: bool = False
    force: bool = False


class QuantizeProgress(msgspec.Struct, frozen=True, kw_only=True):
    """`done_tensors` of `tensors` are written, and `bytes_out`; `tensor` is being written. `seconds_left` None: not yet
    known."""

    done_tensors: int
    tensors: int
    tensor: str
    bytes_out: int
    total_out: int
    seconds_left: float | None


async def quantize(job: QuantizeJob, progress: Callable[[QuantizeProgress], None] | None = None) -> Path:
    """Write `job.out` and return it. Cancelling kills the process and leaves nothing behind. Raises UsageError: `job`
    is invalid, or would overwrite something; ModelNotFound, ModelDamaged: the source cannot be read; DiskFull: not
    enough space, or the disk became full; QuantizeFailed: llama.cpp failed, or its file differs from the forecast."""
    threads = len(choose_cores(read_topology(), "all", job.threads).cpus)
    source = await source_header(job.source)
    check_out(job.out, source, force=job.force)
    async with QuantizeProcess() as process:
        forecast = await forecast_type(process, source, job.type, job.matrices)
        if forecast.lossy and not job.requantize:
            types = ", ".join(forecast.lossy)
            raise UsageError(
                f"{file_name(source.path)} is already quantized ({types}): quantizing it again loses quality twice.",
                "Start from F32, F16, BF16 or Q8_0, or add --allow-requantize.",
            )
        try:
            with part_of(job.out) as part:
                check_space(part, forecast.header.file_size)
                request = msgspec.structs.replace(
                    quantize_request(source, job.type, job.matrices),
                    out=str(part), threads=threads, requantize=job.requantize or not forecast.lossy,
                )  # fmt: skip
                try:
                    await process.send(request)
                    await _follow(process, part, source, forecast, progress)
                except CpuchatError:
                    check_space(part, forecast.header.file_size)  # a full disk is the better explanation
                    raise
                finally:
                    await process.end()  # before the file is deleted: it would create it again
                await asyncio.to_thread(_check_result, part, forecast)
                check_place(job.out, force=job.force)
                part.replace(job.out)
        except OSError as error:
            raise QuantizeFailed(f"Cannot write {job.out}: {error.strerror}.", "Choose another folder.") from None
    return job.out


async def _follow(
    process: QuantizeProcess,
    part: Path,
    source: GGUFHeader,
    forecast: Forecast,
    progress: Callable[[QuantizeProgress], None] | None,
) -> None:
    """Report progress until the file is written. Raises what `LineProcess.receive` raises."""
    begun: list[str] = []
    started = time.monotonic()
    while True:
        answer = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TICK_SECONDS):
                answer = await process.receive()
        if isinstance(answer, QuantizeFinished):
            return
        if isinstance(answer, TensorStarted):
            begun.append(answer.name)
        if progress is None or not begun:
            continue
        written, total = part.stat().st_size, forecast.header.file_size
        elapsed = time.monotonic() - started
        has_begun = elapsed >= 1 and written >= max(total / 100, 1)  # before, nothing can be extrapolated
        progress(
            QuantizeProgress(
                done_tensors=len(begun) - 1,
                tensors=len(source.tensors),
                tensor=begun[-1],
                bytes_out=written,
                total_out=total,
                seconds_left=elapsed * max(total - written, 0) / written if has_begun else None,
            )
        )


def _check_result(part: Path, forecast: Forecast) -> None:
    """Read the header back and sync the file. Raises QuantizeFailed: it differs from the forecast."""
    try:
        header = read_header(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
    except (CpuchatError, OSError) as error:
        raise QuantizeFailed(f"The file that llama.cpp wrote cannot be read: {error}") from None
    expected = {(tensor.name, tensor.type, tensor.shape) for tensor in forecast.header.tensors}
    differs = {(tensor.name, tensor.type, tensor.shape) for tensor in header.tensors} != expected
    if differs or header.metadata.get("general.file_type") != forecast.type.number:
        raise QuantizeFailed("The file that llama.cpp wrote differs from its forecast and was discarded.")
