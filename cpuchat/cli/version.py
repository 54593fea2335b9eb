"""`cpuchat --version`: the installed versions, and the engine's version and CPU features as a worker tells them."""

from __future__ import annotations

import asyncio
import platform
from importlib import metadata

from cpuchat import __version__
from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import CpuchatError, from_code
from cpuchat.cli.output import error_text
from cpuchat.protocol.model_info import EngineInfo


async def engine_info() -> EngineInfo:
    """Return the engine's version and CPU features, from a worker: a broken build can crash. Raises CpuchatError."""
    backend = LocalBackend()
    try:
        failure = await backend.start()
        if failure is not None:
            raise from_code(failure.code, failure.message, failure.hint)
        assert backend.engine is not None
        return backend.engine
    finally:
        await backend.close()


def show() -> int:
    """Print the versions; ask a worker about the engine. Returns the exit code."""
    import click

    click.echo(f"cpuchat {__version__}")
    click.echo(f"Python {platform.python_version()}")
    click.echo(f"llama-cpp-python {_installed('llama-cpp-python')}")
    try:
        info = asyncio.run(engine_info())
    except CpuchatError as error:
        click.echo("engine: unavailable")
        click.echo(error_text(error), err=True)
        return error.exit_code
    if info.llama_commit:
        click.echo(f"llama.cpp {info.llama_commit}")
    click.echo(f"engine built with: {', '.join(info.features) or 'no optional CPU features'}")
    return 0


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
