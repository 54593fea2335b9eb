"""Quantizes a model: checked before it starts, in a process of its own, and not there until it is whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cpuchat.errors import CpuchatError, QuantizeFailed, UsageError
from cpuchat.hardware.placement.cores import check_thread_count
from cpuchat.hardware.topology import read_topology
from cpuchat.models.gguf.header import GGUFHeader, read_header
from cpuchat.models.quantize.forecast import Forecast, foresee, source_header
from cpuchat.models.quantize.messages import Begun, Made, Make
from cpuchat.models.quantize.place import check_free, check_place, check_space, part_of
from cpuchat.models.quantize.process import QuantizeProcess
from cpuchat.models.quantize.types import QuantType

_TICK_SECONDS = 0.25


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`source` becomes `out`. `threads` 0: one for each core. `imatrix`: an importance matrix.

    `requantize` allows a source that was quantized coarsely before, `force` to replace `out`.
    """

    source: Path
    out: Path
    type: QuantType
    threads: int = 0
    imatrix: Path | None = None
    requantize: bool = False
    force: bool = False


class QuantizeProgress(msgspec.Struct, frozen=True, kw_only=True):
    """`done_tensors` of `tensors` are written and `tensor` is being; bytes read and written so far.

    `seconds_left` None: not known yet.
    """

    done_tensors: int
    tensors: int
    tensor: str
    bytes_in: int
    bytes_out: int
    total_out: int
    seconds_left: float | None


async def quantize(job: Job, progress: Callable[[QuantizeProgress], None] | None = None) -> Path:
    """Make `job.out` and return it. Cancelling it kills the work and leaves nothing behind.

    Raises:
        UsageError: `job` asks for what cannot be, or would overwrite something; the message says what.
        ModelNotFound, ModelDamaged: the source or the importance matrix cannot be read.
        DiskFull: there is not enough room, or no more.
        QuantizeFailed: llama.cpp gave up, or what it wrote is not what it announced.
    """
    threads = check_thread_count(job.threads, read_topology())
    source = await source_header(job.source)
    check_place(job.out, source, force=job.force)
    async with QuantizeProcess() as process:
        forecast = await foresee(process, source, job.type)
        _check_quality(job, source, forecast)
        try:
            with part_of(job.out) as part:
                check_space(part, forecast.file_size)
                await _write(process, job, part, source, forecast, threads, progress)
                await asyncio.to_thread(_check_result, part, forecast)
                check_free(job.out, force=job.force)
                part.replace(job.out)
        except OSError as error:
            raise QuantizeFailed(f"Cannot write {job.out}: {error.strerror}.", "Choose another place.") from None
    return job.out


def _check_quality(job: Job, source: GGUFHeader, forecast: Forecast) -> None:
    """Raises UsageError."""
    if forecast.needs_imatrix and job.imatrix is None:
        raise UsageError(
            f"{job.type.name} needs an importance matrix: without one the result would be worthless.",
            "Give --imatrix FILE (many repositories have one), or choose a type of 4 bits or more.",
        )
    if forecast.lossy and not job.requantize:
        types = ", ".join(forecast.lossy)
        raise UsageError(
            f"{source.path.name} is quantized already ({types}): doing it again loses quality twice.",
            "Start from F16, BF16, F32 or Q8_0, or give --allow-requantize.",
        )


async def _write(
    process: QuantizeProcess,
    job: Job,
    part: Path,
    source: GGUFHeader,
    forecast: Forecast,
    threads: int,
    progress: Callable[[QuantizeProgress], None] | None,
) -> None:
    """Have `part` written; the process is gone afterwards, however it went.

    Raises:
        DiskFull, QuantizeFailed, ModelNotFound, ModelDamaged, UsageError: as `quantize`.
    """
    request = Make(
        source=str(source.path), out=str(part), number=job.type.number, threads=threads,
        imatrix=str(job.imatrix) if job.imatrix else "", requantize=job.requantize or not forecast.lossy,
    )  # fmt: skip
    try:
        await process.ask(request)
        await _follow(process, part, source, forecast, progress)
    except CpuchatError:
        check_space(part, forecast.file_size)  # how much is missing is the better explanation
        raise
    finally:
        await process.end()  # before the file goes: it would make it again


async def _follow(
    process: QuantizeProcess,
    part: Path,
    source: GGUFHeader,
    forecast: Forecast,
    progress: Callable[[QuantizeProgress], None] | None,
) -> None:
    """Tell how far it is, until the file is written. Raises what `process.answer` raises."""
    sizes = {tensor.name: tensor.nbytes for tensor in source.tensors}
    begun: list[str] = []
    started = time.monotonic()
    while True:
        answer = None
        with contextlib.suppress(TimeoutError):
            answer = await asyncio.wait_for(process.answer(), _TICK_SECONDS)
        if isinstance(answer, Made):
            return
        if isinstance(answer, Begun):
            begun.append(answer.name)
        if progress is None or not begun:
            continue
        written = part.stat().st_size
        elapsed = time.monotonic() - started
        progress(
            QuantizeProgress(
                done_tensors=len(begun) - 1,
                tensors=len(sizes),
                tensor=begun[-1],
                bytes_in=sum(sizes[name] for name in begun[:-1]),
                bytes_out=written,
                total_out=forecast.file_size,
                seconds_left=_seconds_left(elapsed, written, forecast.file_size),
            )
        )


def _seconds_left(elapsed: float, done: int, total: int) -> float | None:
    """At the pace so far; None while that says little."""
    if elapsed < 1 or done < total / 100:
        return None
    return elapsed * max(total - done, 0) / done


def _check_result(part: Path, forecast: Forecast) -> None:
    """Read the header back and have it on the disk.

    Raises:
        QuantizeFailed: it is not what was announced.
    """
    try:
        header = read_header(part)
        expected = {(tensor.name, tensor.type, tensor.shape) for tensor in forecast.header.tensors}
        differs = {(tensor.name, tensor.type, tensor.shape) for tensor in header.tensors} != expected
        if differs or header.metadata.get("general.file_type") != forecast.type.number:
            raise QuantizeFailed("The file that llama.cpp wrote is not the one it announced; it was thrown away.")
        with part.open("rb") as file:
            os.fsync(file.fileno())
    except (CpuchatError, OSError) as error:
        if isinstance(error, QuantizeFailed):
            raise
        raise QuantizeFailed(f"What llama.cpp wrote cannot be read back: {error}") from None
