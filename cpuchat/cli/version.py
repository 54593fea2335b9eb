"""`cpuchat --version`: the installed versions and the engine's CPU features."""

from __future__ import annotations

import asyncio
import platform
from importlib import metadata

from cpuchat import __version__
from cpuchat.cli.engine_info import engine_info
from cpuchat.cli.output import error_text
from cpuchat.errors import CpuchatError


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
