"""Asks a worker for the engine's version and CPU features."""

from __future__ import annotations

from cpuchat.backend.local import LocalBackend
from cpuchat.errors import from_code
from cpuchat.model_info import EngineInfo


async def engine_info() -> EngineInfo:
    """Return the engine's version and CPU features. Only a worker loads llama.cpp: a broken build can crash its
    process.

    Raises:
        CpuchatError: the worker did not come up.
    """
    backend = LocalBackend()
    try:
        failure = await backend.start()
        if failure is not None:
            raise from_code(failure.code, failure.message, failure.hint)
        assert backend.engine is not None
        return backend.engine
    finally:
        await backend.close()
