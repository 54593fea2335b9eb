"""Starts and follows the process of one download."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from cpuchat import paths
from cpuchat.children import python_command
from cpuchat.models.downloads.state import Order, Report

_STOP_SECONDS = 5.0
_MAX_LOG = 1 << 20
# Read by huggingface_hub at import: no second way of transfer, no telemetry, no progress bars.
_ENVIRONMENT = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class DownloadProcess:
    """A running download process; created by `start`. Use from one event loop."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, order: Order) -> DownloadProcess:
        """Start the process. Raises OSError."""
        with _open_log() as log:
            process = await asyncio.create_subprocess_exec(
                *python_command("-m", "cpuchat.models.downloads.child"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,  # Ctrl+C in the terminal is for the parent, which stops it in order
                limit=1 << 20,
            )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        return cls(process)

    async def reports(self, silence: float) -> AsyncIterator[Report | None]:
        """Yield its reports until it is gone; None whenever there was none for `silence` seconds."""
        stream = self._process.stdout
        assert stream is not None
        while True:
            try:
                line = await asyncio.wait_for(stream.readline(), silence)
            except TimeoutError:
                yield None
                continue
            if not line:
                break
            with contextlib.suppress(msgspec.DecodeError):  # the last line of a killed process
                yield msgspec.json.decode(line, type=Report)
        await self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM, and SIGKILL after a few seconds."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        asyncio.get_running_loop().call_later(_STOP_SECONDS, self._kill)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.kill()


def log_file() -> Path:
    """Return where unexpected errors of all downloads are logged."""
    return paths.log_dir() / "downloads.log"


def _open_log() -> BinaryIO:
    file = log_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if file.exists() and file.stat().st_size > _MAX_LOG:
            file.unlink()
        return file.open("ab")
    except OSError:  # a cache folder that cannot be written does not prevent downloads
        return Path(os.devnull).open("wb")
