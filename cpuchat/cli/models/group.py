"""The commands under `cpuchat models`."""

from __future__ import annotations

import click

from cpuchat.cli.lazy import LazyGroup

_COMMANDS = {
    "list": ("cpuchat.cli.models.list", "list_models", "What is on this machine."),
    "pair": ("cpuchat.cli.models.pair", "pair", "Which draft model fits which target."),
    "synthetic": ("cpuchat.cli.models.synthetic", "synthetic", "Write a model of a real shape with random weights."),
}


@click.group(cls=LazyGroup, commands_by_name=_COMMANDS)
def models() -> None:
    """Find, download, check, compare and keep models."""
