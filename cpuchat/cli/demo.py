"""`cpuchat demo`: try the program without a download."""

from __future__ import annotations

from typing import Any

import click

from cpuchat.cli.options import DEMO, placement_options, setting, stacked

_EPILOG = """\b
Example:
  cpuchat demo    chat with the demo model

The demo model is a toy that knows cpuchat's own manual. For real work, give a GGUF file: cpuchat --model FILE."""


@click.command(epilog=_EPILOG, short_help="Try cpuchat with the bundled demo model.")
@stacked(placement_options(), setting("engine.ctx"))
def demo(**values: Any) -> int:
    """Chat with the bundled demo model: no download, no setup."""
    from cpuchat.cli.app import open_app

    return open_app(DEMO, values)
