"""Tests stopping, dying and running out of room in the middle of the work."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import DiskFull, QuantizeFailed
from cpuchat.models.gguf.parse import TensorInfo
from cpuchat.models.quantize.make import QuantizeJob, QuantizeProgress, quantize
from tests.models.quantize.jobs import children, job, refused
from tests.support.big_headers import big_header, hollow_file

pytestmark = pytest.mark.slow


def stop_when_begun(job: QuantizeJob, act: Callable[[], None]) -> BaseException | None:
    """Run the job and call `act` once llama.cpp is at work; returns the resulting error."""

    async def run() -> None:
        done = False

        def progress(_: QuantizeProgress) -> None:
            nonlocal done
            if not done:
                done = True
                act()

        await quantize(job, progress)

    try:
        asyncio.run(run())
    except BaseException as error:
        return error
    return None


def test_a_process_that_is_killed_is_told(large: Path, tmp_path: Path) -> None:
    before = set(children())

    def kill() -> None:
        for pid in set(children()) - before:
            os.kill(pid, signal.SIGKILL)

    error = stop_when_begun(job(large, tmp_path / "out.gguf", "IQ4_XS"), kill)
    assert isinstance(error, QuantizeFailed) and "killed" in error.message
    assert list(tmp_path.iterdir()) == []


def test_room_is_looked_for_before_anything_is_written(tmp_path: Path) -> None:
    """A source whose vocabulary would take more as F32 than there is free."""
    small = big_header("0.5b", "Q8_0")
    width = small.n_embd
    rows = 2 * shutil.disk_usage(tmp_path).free // (4 * width)  # other tests free some meanwhile
    embeddings = TensorInfo("token_embd.weight", (width, rows), "Q8_0", 0, rows * width // 32 * 34)
    huge = msgspec.structs.replace(small, tensors=[embeddings])
    source = hollow_file(tmp_path / "huge-Q8_0.gguf", huge)
    error = refused(job(source, tmp_path / "out.gguf", "F32"), DiskFull)
    assert "Not enough disk space" in error.message


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Make writes beyond that many bytes fail, here and in child processes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_gets_full_ends_it_and_leaves_nothing(large: Path, tmp_path: Path) -> None:
    with files_limited_to(4 << 20):
        error = refused(job(large, tmp_path / "out.gguf", "Q8_0"), DiskFull)
    assert "Cannot write the whole file" in error.message
