"""The commands under `cpuchat models`."""

from __future__ import annotations

import click

from cpuchat.cli.lazy import LazyGroup

_COMMANDS = {
    "list": ("cpuchat.cli.models.list", "list_models", "What is on this machine."),
    "delete": ("cpuchat.cli.models.delete", "delete_model", "Make room, after saying how much."),
    "verify": ("cpuchat.cli.models.verify", "verify", "Compare files with the checksums that were published."),
    "search": ("cpuchat.cli.models.search", "search", "Look for repositories on Hugging Face."),
    "files": ("cpuchat.cli.models.files", "files", "What a repository holds, and which of it fits here."),
    "download": ("cpuchat.cli.models.download", "download", "Get a model from Hugging Face, checked."),
    "show": ("cpuchat.cli.models.show", "show", "What the header of a model says."),
    "catalog": ("cpuchat.cli.models.catalog", "catalog", "Models worth knowing, and which of them fit here."),
    "pair": ("cpuchat.cli.models.pair", "pair", "Which draft model fits which target."),
    "quantize": ("cpuchat.cli.models.quantize", "quantize", "Write a smaller file of a model."),
    "synthetic": ("cpuchat.cli.models.synthetic", "synthetic", "Write a model of a real shape with random weights."),
}


@click.group(cls=LazyGroup, commands_by_name=_COMMANDS)
def models() -> None:
    """Find, download, check, compare and keep models."""
