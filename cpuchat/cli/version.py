"""`cpuchat --version`: what is installed and what the engine was built with."""

from __future__ import annotations

import asyncio
import platform
from importlib import metadata

from cpuchat import __version__
from cpuchat.backend.local import LocalBackend
from cpuchat.cli.render import error_text
from cpuchat.errors import CpuchatError, from_code
from cpuchat.protocol import EngineInfo


def show() -> int:
    """Print the versions; ask a worker about the engine. Returns the exit code."""
    import click

    click.echo(f"cpuchat {__version__}")
    click.echo(f"Python {platform.python_version()}")
    click.echo(f"llama-cpp-python {_installed('llama-cpp-python')}")
    try:
        info = asyncio.run(_engine())
    except CpuchatError as error:
        click.echo("engine: cannot be used")
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
        return "is not installed"


async def _engine() -> EngineInfo:
    """Only a worker may load llama.cpp: a broken build can end the process that does.

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
