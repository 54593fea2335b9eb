"""`cpuchat --version`: the installed versions, and the engine's version and CPU features as a worker tells them."""

from __future__ import annotations

import asyncio
import contextlib
import platform
from importlib import metadata

from cpuchat import __version__
from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import CpuchatError, from_code
from cpuchat.cli.output import error_text
from cpuchat.config import settings
from cpuchat.models.cpu_modules import AUTO
from cpuchat.protocol.model_info import EngineInfo


async def engine_info(cpu_module: str = AUTO) -> EngineInfo:
    """Return the engine's version, CPU features and CPU module, that of the settings. Only a worker loads llama.cpp: a
    broken build can crash its process. Raises CpuchatError: the worker did not come up."""
    backend = LocalBackend()
    try:
        failure = await backend.start(cpu_module)
        if failure is not None:
            raise from_code(failure.code, failure.message, failure.hint)
        assert backend.engine is not None
        return backend.engine
    finally:
        await backend.close()


def show() -> int:
    """Print the versions; ask a worker about the engine. Returns the exit code."""
    import click

    from cpuchat.present.machine import kernel_words, module_words

    click.echo(f"cpuchat {__version__}")
    click.echo(f"Python {platform.python_version()}")
    click.echo(f"llama-cpp-python {metadata.version('llama-cpp-python')}")
    cpu_module = AUTO
    with contextlib.suppress(CpuchatError):  # the version is shown beside broken settings, too
        cpu_module = settings.load().engine.cpu_module
    try:
        info = asyncio.run(engine_info(cpu_module))
    except CpuchatError as error:
        click.echo("engine: unavailable")
        click.echo(error_text(error), err=True)
        return error.exit_code
    if info.llama_commit:
        click.echo(f"llama.cpp {info.llama_commit}")
    click.echo(f"engine built with: {', '.join(info.features) or 'no optional CPU features'}")
    click.echo(f"CPU module: {module_words(info)}")
    click.echo(f"kernels: {kernel_words(info)}")
    return 0
