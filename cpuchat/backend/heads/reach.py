"""Checks that RPC workers can be reached."""

from __future__ import annotations

import asyncio
import os
import socket

from cpuchat.errors import ServerUnreachable

_REACH_SECONDS = 5.0


async def unreachable(workers: tuple[str, ...]) -> ServerUnreachable | None:
    """Return why one of the RPC workers cannot be reached, with which llama-server would abort; None if all can."""
    problems = await asyncio.gather(*map(_problem, workers))
    return next(filter(None, problems), None)


async def _problem(worker: str) -> ServerUnreachable | None:
    host, _, port = worker.rpartition(":")
    try:
        async with asyncio.timeout(_REACH_SECONDS):
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:  # TimeoutError is one
        hint = f"Start it there: cpuchat serve --rpc-worker --host ADDRESS --port {port}."
        return ServerUnreachable(f"Cannot reach the RPC worker {worker}: {_reason(error)}.", hint)
    writer.close()
    return None


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror):  # whose numbers are not those of errno
        return error.strerror or "unknown host"
    return os.strerror(error.errno) if error.errno else "no connection"  # to any of the addresses of a name
